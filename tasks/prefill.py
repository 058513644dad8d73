"""The prefill task: makes one document's snapshot, once, however many jobs ask for it."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from kernels.errors import ChunkMismatch, ContextExceeded, KernelError
from kernels.kv import PrefixKV
from kernels.kv_codec import CODEC, decode_chunk, encode_chunk
from kernels.prefill import Prefilled, prefill
from storage.database import utc_now
from storage.documents import get_text
from storage.errors import ObjectMissing, SnapshotCorrupt, StorageError
from storage.fingerprint import chunk_keys
from storage.items import fail_document_items, fail_item, queued_items
from storage.manifest import ChunkEntry, Manifest, describe_chunk
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import (
    WriteClaim,
    abandon_writing,
    add_chunk,
    claim_writing,
    find_or_create,
    forget_chunk,
    get_chunks,
    known_chunks,
    note_progress,
    note_readings,
    publish,
    put_manifest,
)
from tasks.app import app
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
STORE_THREADS = 2
CHUNKS_IN_FLIGHT = 2


@app.task(name="platemaker.prefill")  # type: ignore[untyped-decorator] # celery is untyped
def prefill_document(tenant: str, document_id: str) -> None:
    """Makes sure the document's snapshot is ready for the items that wait for it, then calls decode. Idempotent."""
    place = app.require_workplace()
    place.leave_if_stopping()
    snapshot_id = prepare_snapshot(place, tenant, document_id)
    if snapshot_id is not None:
        app.send_task("platemaker.decode", args=[snapshot_id])


def prepare_snapshot(place: Workplace, tenant: str, document_id: str) -> int | None:
    """The id of the ready snapshot; None where nothing waits for it, or another worker is at it, or it failed."""
    engine = place.engine
    ids = _fitting_prefix(place, tenant, document_id)
    if ids is None:
        return None
    fingerprint = engine.fingerprint(tenant, document_id, ids)
    owner = place.new_owner()
    with place.heartbeat.holding(owner):
        with place.database.writing() as session:
            now = utc_now()
            row = find_or_create(session, fingerprint, num_tokens=len(ids), now=now)
            if row.state == SnapshotState.READY:
                note_readings(session, row, model=engine.name, computed_tokens=0, prefill_s=0.0, now=now)
                return row.snapshot_id
            claim = claim_writing(session, row.snapshot_id, owner=owner, now=now, lease_s=place.settings.lease_s)
        if claim is None:
            return None
        if claim.attempt > place.settings.max_attempts:
            _give_up(place, row, claim, f"Reading this document failed {claim.attempt - 1} times; it is set aside.")
            return None
        try:
            return _write(
                place, row, claim, ids, chunk_keys(fingerprint.chain_root(), ids, engine.settings.chunk_tokens)
            )
        except KernelError as exc:
            _give_up(place, row, claim, str(exc))
            return None
        except BaseException:
            with place.database.writing() as session:
                abandon_writing(session, claim, state=SnapshotState.WRITING, error=None)
            raise


def _fitting_prefix(place: Workplace, tenant: str, document_id: str) -> list[int] | None:
    """The prefix's tokens, if an item waits whose question and answer fit behind them; the others are refused.

    No weight is loaded for this, so a document that is too long costs nothing.
    """
    engine = place.engine
    with place.database.reading() as session:
        items = queued_items(session, tenant=tenant, document_id=document_id, model=engine.name)
    if not items:
        return None
    ids = engine.prompter.prefix_ids(get_text(place.store, tenant, document_id))
    refused = {}
    for item in items:
        needed = len(ids) + len(engine.prompter.question_ids(item.question)) + int(item.params["max_new_tokens"])
        if needed > engine.context_len:
            refused[item.item_id] = str(ContextExceeded(needed, engine.context_len))
    if refused:
        with place.database.writing() as session:
            for item_id, error in refused.items():
                fail_item(session, item_id, owner=None, code="too_long", error=error, now=utc_now())
    return ids if len(refused) < len(items) else None


def _write(place: Workplace, row: SnapshotRow, claim: WriteClaim, ids: list[int], keys: list[str]) -> int | None:
    engine = place.engine
    size = engine.settings.chunk_tokens
    kv = PrefixKV(len(ids))
    entries = _load_known_chunks(place, kv, ids, keys)
    with ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store") as pool, engine.lock:
        storing: dict[int, Future[ChunkEntry]] = {}

        def store_chunk(kv: PrefixKV, start: int, stop: int) -> None:
            place.leave_if_stopping()
            index = start // size
            if index not in entries:
                storing[index] = pool.submit(_put_chunk, place, row.tenant, keys[index], kv, start, stop)
                if index - CHUNKS_IN_FLIGHT in storing:
                    storing[index - CHUNKS_IN_FLIGHT].result()
            with place.database.writing() as session:
                note_progress(session, claim, stop)

        done = prefill(engine.model, ids, chunk_tokens=size, kv=kv, on_chunk=store_chunk)
        entries |= {index: future.result() for index, future in storing.items()}
    return _publish(place, row, claim, done, tuple(entries[index] for index in range(len(keys))))


def _put_chunk(place: Workplace, tenant: str, key: str, kv: PrefixKV, start: int, stop: int) -> ChunkEntry:
    data = encode_chunk(kv, start, stop)
    entry = describe_chunk(key, start, stop, data)
    place.store.put(entry.object_key, data)
    with place.database.writing() as session:
        add_chunk(session, tenant, entry, utc_now())
    return entry


def _load_known_chunks(place: Workplace, kv: PrefixKV, ids: list[int], keys: list[str]) -> dict[int, ChunkEntry]:
    """Fills `kv` from chunks of this prefix chain that are stored already: of an earlier attempt that was cut off,
    or of a document with the same beginning. A damaged chunk ends the run and is forgotten."""
    size = place.engine.settings.chunk_tokens
    with place.database.reading() as session:
        rows = known_chunks(session, keys)
    found = tuple(
        ChunkEntry(
            key=row.chunk_key,
            start=index * size,
            stop=index * size + row.num_tokens,
            size_bytes=row.size_bytes,
            xxh3=row.xxh3,
            sha256=row.sha256,
        )
        for index, row in enumerate(rows)
    )
    entries: dict[int, ChunkEntry] = {}
    try:
        for entry, data in get_chunks(place.store, found):
            decode_chunk(
                data,
                kv,
                entry.start,
                entry.stop,
                dtype=place.engine.identity.kv_dtype,
                device=str(place.engine.model.device),
            )
            kv.length = entry.stop
            entries[entry.start // size] = entry
    except (SnapshotCorrupt, ObjectMissing, ChunkMismatch) as exc:
        logger.warning("stored chunk is damaged", extra={"reason": type(exc).__name__})
        with place.database.writing() as session:
            forget_chunk(session, found[len(entries)].key)
    return entries


def _publish(
    place: Workplace, row: SnapshotRow, claim: WriteClaim, done: Prefilled, entries: tuple[ChunkEntry, ...]
) -> int | None:
    manifest = Manifest(
        fingerprint=row.fields,
        num_tokens=done.kv.length,
        num_layers=done.kv.num_layers,
        chunks=entries,
        codec=CODEC,
        probe_token_ids=done.probe.token_ids,
        probe_logits=done.probe.logits,
        producer=place.engine.producer,
    )
    digest = put_manifest(place.store, row, manifest)
    now = utc_now()
    with place.database.writing() as session:
        published = publish(
            session,
            claim,
            manifest,
            manifest_sha256=digest,
            computed_tokens=done.computed_tokens,
            prefill_s=done.prefill_s,
            now=now,
        )
        if published:
            note_readings(
                session,
                row,
                model=place.engine.name,
                computed_tokens=done.computed_tokens,
                prefill_s=done.prefill_s,
                now=now,
            )
    return row.snapshot_id if published else None


def _give_up(place: Workplace, row: SnapshotRow, claim: WriteClaim, reason: str) -> None:
    """Fails the document's waiting items; the next job that asks for the document may try again."""
    try:
        with place.database.writing() as session:
            abandon_writing(session, claim, state=SnapshotState.FAILED, error=reason)
            fail_document_items(
                session,
                tenant=row.tenant,
                document_id=row.document_id,
                model=place.engine.name,
                code="prefill_failed",
                error=reason,
                now=utc_now(),
            )
    except StorageError:
        logger.warning("giving up a snapshot failed", extra={"snapshot_id": row.snapshot_id})
        raise
