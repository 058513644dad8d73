"""From a snapshot's row to its KV on the device: memory first, then the store; nothing is used unproved."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kernels.codecs import KVReceiver, decode_state
from kernels.errors import ChunkMismatch, ProbeMismatch
from kernels.kv import PrefixKV
from kernels.prefill import Probe, check_probe
from kernels.prompt import ids_digest
from storage.database import utc_now
from storage.errors import ObjectMissing, SnapshotCorrupt, SnapshotMissing
from storage.leases import release_leases, take_lease
from storage.loading import get_chunks, load_chunks
from storage.manifest import ChunkEntry, Manifest
from storage.schema import SnapshotRow
from storage.snapshots import get_manifest, note_used
from tasks.errors import PromptChanged
from tasks.metrics import note_load, note_source
from tasks.progress import send_progress
from tasks.residents import ResidentKey
from tasks.room import fitting_batch
from tasks.workplace import Workplace

DAMAGED = (SnapshotCorrupt, ObjectMissing, ChunkMismatch, ProbeMismatch)  # the snapshot is not what was published


@dataclass
class LoadedPrefix:
    """A snapshot's KV. Its layers may still be on their way; `prove` has to be called before anything computed from
    it is used."""

    place: Workplace
    row: SnapshotRow
    kv: PrefixKV
    manifest: Manifest | None
    max_batch: int  # questions that fit behind it at once
    loaded_from: str | None  # memory, copies or store; None: it was read
    ids: list[int] | None = None  # where they are no document's
    load_s: float = 0.0
    load_bytes: int = 0
    read_s: float = 0.0  # until it was there, where it was read just for this
    began_ns: int = field(default_factory=time.time_ns)
    is_charged: bool = False  # the load was noted with an answer; see docs/cost.md
    _loading: threading.Thread | None = None
    _errors: list[BaseException] = field(default_factory=list)
    is_proved: bool = False

    def prove(self) -> None:
        """Waits for the rest of it. On the first load in this process, the model has to compute from it what it
        computed when it was stored, and the document has to give the same tokens as then.

        Raises:
            SnapshotCorrupt, ObjectMissing, ChunkMismatch, ProbeMismatch: it is not what was published.
            PromptChanged: its document has other tokens now.
            ObjectStoreError: the store cannot be read.
        """
        if self.is_proved:
            return
        self.join()
        if self._errors:
            raise self._errors[0]
        key = resident_key(self.row)
        if self.manifest is not None and key not in self.place.proved:
            self._probe(self.manifest)
            self.place.proved.add(key)
        with self.place.database.writing() as session:
            note_used(session, self.row.snapshot_id, utc_now())
        self.place.residents.keep(key, self.kv)
        self.is_proved = True

    def join(self) -> None:
        if self._loading is not None:
            self._loading.join()

    def _probe(self, manifest: Manifest) -> None:
        engine = self.place.engine
        ids = self.ids
        if ids is None:
            ids = engine.prompter.prefix_ids(self.place.text(self.row.tenant, self.row.document_id))
        if ids_digest(ids) != self.row.fields["prefix_ids"]:
            raise PromptChanged(self.row.snapshot_id)
        check_probe(engine.model, ids[-1], self.kv, Probe(manifest.probe_token_ids, manifest.probe_logits))


def resident_key(row: SnapshotRow) -> ResidentKey:
    return ResidentKey(row.snapshot_id, str(row.manifest_sha256))


@contextmanager
def loaded(place: Workplace, row: SnapshotRow, ids: list[int] | None = None) -> Iterator[LoadedPrefix]:
    """The snapshot's KV on the device, while its last layers may still be arriving. `ids` are its tokens, where they
    are not those of a stored document.

    Raises:
        SnapshotCorrupt, ObjectMissing, ChunkMismatch: it is not what was published.
        MemoryExceeded: it does not fit, not even with one question.
    """
    kept = place.residents.get(resident_key(row))
    if kept is not None:
        note_source("memory")
        send_progress(document_id=row.document_id, tokens=row.num_tokens, snapshot="in memory")
        yield LoadedPrefix(place, row, kept, None, place.engine.settings.max_batch, "memory", ids)
        return
    send_progress(document_id=row.document_id, tokens=row.num_tokens, snapshot="loaded")
    manifest = get_manifest(place.store, row)
    if manifest.num_tokens != row.num_tokens:
        raise SnapshotCorrupt(row.fingerprint, expected=f"{row.num_tokens} tokens", actual=f"{manifest.num_tokens}")
    max_batch = fitting_batch(place, row)
    kv = place.engine.model.new_kv(manifest.num_tokens, make_room=place.residents.make_room)
    if kv.layout.has_state:
        states = manifest.states or ()
        if not states or states[-1].stop != manifest.num_tokens:
            raise SnapshotCorrupt(row.fingerprint, expected="a state behind its last token", actual="none")
        load_state(place, kv, states[-1])
    receiver = _receiver(kv, manifest.chunks, manifest.codec)
    kv.length = manifest.num_tokens
    source = "copies" if all(place.store.has_copy(entry.object_key) for entry in manifest.chunks) else "store"
    note_source(source)
    prefix = LoadedPrefix(place, row, kv, manifest, max_batch, source, ids)

    def load() -> None:
        began = time.perf_counter()
        try:
            load_chunks(place.store, manifest.chunks, receiver)
            prefix.load_s = time.perf_counter() - began
            prefix.load_bytes = sum(entry.size_bytes for entry in manifest.chunks)
            note_load(manifest.codec, prefix.load_bytes, prefix.load_s)
        except BaseException as exc:
            prefix._errors.append(exc)
            receiver.arrivals.fail(exc)

    prefix._loading = threading.Thread(target=load, name="load")
    prefix._loading.start()
    try:
        yield prefix
    finally:
        prefix.join()


@contextmanager
def stored(place: Workplace, row: SnapshotRow, owner: str) -> Iterator[LoadedPrefix]:
    """`loaded`, under a lease of `owner`.

    Raises:
        SnapshotMissing: it is not ready any more.
    """
    with leased(place, row.snapshot_id, owner) as is_ready:
        if not is_ready:
            raise SnapshotMissing(str(row.snapshot_id))
        with loaded(place, row) as prefix:
            yield prefix


@contextmanager
def leased(place: Workplace, snapshot_id: int, owner: str) -> Iterator[bool]:
    """Keeps the snapshot from the sweep inside the block. False: it is not ready any more."""
    with place.database.writing() as session:
        is_ready = take_lease(
            session,
            snapshot_id,
            owner=owner,
            now=utc_now(),
            lease_s=place.settings.lease_s,
            ttl_s=place.lifetimes.ttl_s,
        )
    try:
        yield is_ready
    finally:
        with place.database.writing() as session:
            release_leases(session, owner)


def load_run(place: Workplace, kv: PrefixKV, entries: Sequence[ChunkEntry], codec: str) -> None:
    """Fills the beginning of `kv` with these chunks, which follow each other from the first token on.

    Raises:
        SnapshotCorrupt, ObjectMissing, ChunkMismatch: one is not what was stored; what `kv` holds is of no use.
    """
    try:
        load_chunks(place.store, entries, _receiver(kv, entries, codec))
    finally:
        kv.arrivals = None
    kv.length = entries[-1].stop


def load_state(place: Workplace, kv: PrefixKV, entry: ChunkEntry) -> None:
    """Gives `kv` the windows and recurrent states behind `entry.stop` tokens.

    Raises:
        SnapshotCorrupt, ObjectMissing, ChunkMismatch: it is not what was stored.
    """
    for _, data in get_chunks(place.store, [entry]):
        decode_state(data, kv, entry.stop, device=str(place.engine.model.device))


def _receiver(kv: PrefixKV, entries: Sequence[ChunkEntry], codec: str) -> KVReceiver:
    stop = 0
    for entry in entries:
        if entry.start != stop:
            raise SnapshotCorrupt(entry.object_key, expected=f"tokens from {stop} on", actual=f"from {entry.start} on")
        stop = entry.stop
    if stop > kv.capacity:
        raise SnapshotCorrupt(entries[-1].object_key, expected=f"{kv.capacity} tokens", actual=f"{stop} tokens")
    return KVReceiver(kv, [(entry.start, entry.stop) for entry in entries], codec=codec)
