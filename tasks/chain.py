"""The stored chunks of one prefix in one codec: read back what is there, store what is missing."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kernels.codecs import CODECS, chunk_parts, decode_chunk, encode_chunk, encode_state
from kernels.errors import ChunkMismatch
from kernels.kv import PrefixKV
from storage.database import utc_now
from storage.errors import ObjectMissing, SnapshotCorrupt
from storage.fingerprint import Fingerprint, chunk_keys, state_key
from storage.loading import get_chunks
from storage.manifest import ChunkEntry, Part, describe_chunk
from storage.schema import ChunkRow
from storage.snapshots import add_chunk, forget_chunk, known_chunks, stored_chunks
from tasks.loading import load_run, load_state
from tasks.metrics import note_chunk
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
STATE_TOKENS = 4096  # a state is stored behind every so many tokens: as large as thousands of tokens of KV


@dataclass
class ChunkChain:
    """Chunk keys depend on the codec that the chunks are really in, so one key never stands for two kinds of bytes.

    `stored` receives what a reader will decode. A chunk is never stored over one that is known and whole: other
    snapshots may hold that one's digest. Where the model has windows or recurrent layers, their state is stored too,
    behind some of the chunks and the last one.
    """

    place: Workplace
    fingerprint: Fingerprint
    ids: list[int]
    codec: str
    stored: PrefixKV
    entries: dict[int, ChunkEntry] = field(default_factory=dict)
    state_entries: dict[int, ChunkEntry] = field(default_factory=dict)
    put_s: float = 0.0  # of all puts together, and what they moved
    put_bytes: int = 0
    _storing: dict[int, Future[ChunkEntry]] = field(default_factory=dict)
    _storing_states: dict[int, Future[ChunkEntry]] = field(default_factory=dict)
    _decoding: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        root = replace(self.fingerprint, codec=self.codec).chain_root()
        self.stops = self.place.engine.chunk_stops(len(self.ids))
        self.keys = dict(zip(self.stops, chunk_keys(root, self.ids, self.stops), strict=True))
        has_state = self.stored.layout.has_state
        self.state_keys = {stop: state_key(self.keys[stop]) for stop in state_stops(self.stops) if has_state}

    def load(self) -> None:
        """Fills `stored` from the leading chunks that are stored already: of an earlier attempt that was cut off, or
        of a document with the same beginning. What is damaged is forgotten, and the run ends before it."""
        found, states = self._known()
        while found:
            # With states, the run ends where one is, and before the last chunk, which is always computed.
            ends = [entry.stop for entry in found if entry.stop in states and entry.stop < len(self.ids)]
            stop = (ends or [0])[-1] if self.state_keys else found[-1].stop
            run = [entry for entry in found if entry.stop <= stop]
            try:
                if run:
                    load_run(self.place, self.stored, run, self.codec)
                if run and self.state_keys:
                    load_state(self.place, self.stored, states[stop])
                rest = [*found[len(run) :], *(entry for at, entry in states.items() if at > stop)]
                for _ in get_chunks(self.place.store, rest):
                    pass  # computed again, but not stored again
            except (SnapshotCorrupt, ObjectMissing) as exc:
                logger.warning("stored chunk is damaged", extra={"reason": type(exc).__name__})
                damaged = next(entry for entry in (*found, *states.values()) if entry.object_key == exc.key)
            except ChunkMismatch as exc:
                logger.warning("stored chunk does not fit", extra={"reason": str(exc)})
                damaged = found[0]
            else:
                self.entries = {entry.stop: entry for entry in found}
                self.state_entries = states
                return
            self.stored.length = 0
            with self.place.database.writing() as session:
                forget_chunk(session, damaged.key)
            found, states = self._known()

    def _known(self) -> tuple[list[ChunkEntry], dict[int, ChunkEntry]]:
        """The leading chunks that are stored, and the states among them."""
        with self.place.database.reading() as session:
            rows = known_chunks(session, list(self.keys.values()))
            state_rows = stored_chunks(session, self.state_keys.values())
        spans = pairwise((0, *self.stops))
        found = [_entry(row, start, stop) for row, (start, stop) in zip(rows, spans, strict=False)]
        states = {
            stop: _entry(state_rows[key], stop, stop) for stop, key in self.state_keys.items() if key in state_rows
        }
        return found, states

    def store(self, pool: Executor, kv: PrefixKV, start: int, stop: int) -> None:
        """Begins to store the chunk, and the state behind it, unless they are there, once the one before is stored."""
        for earlier in (*self._storing.values(), *self._storing_states.values()):
            earlier.result()
        if stop not in self.entries and stop not in self._storing:
            self._storing[stop] = pool.submit(self._put_chunk, kv, start, stop)
        if stop in self.state_keys and kv.length == stop and stop not in self.state_entries:
            data = encode_state(kv)  # now: the next chunk changes it
            self._storing_states[stop] = pool.submit(self._put, self.state_keys[stop], stop, stop, lambda: data)

    def finish(self) -> tuple[ChunkEntry, ...]:
        """All chunks in order, once they are stored."""
        self.entries |= {stop: future.result() for stop, future in self._storing.items()}
        self.state_entries |= {stop: future.result() for stop, future in self._storing_states.items()}
        self.stored.length = len(self.ids)
        return tuple(self.entries[stop] for stop in self.stops)

    @property
    def states(self) -> tuple[ChunkEntry, ...] | None:
        """Those of a finished chain, in order; None where the model has none."""
        return tuple(self.state_entries[stop] for stop in sorted(self.state_entries)) if self.state_keys else None

    def _put_chunk(self, kv: PrefixKV, start: int, stop: int) -> ChunkEntry:
        def encode() -> bytes:
            data = encode_chunk(kv, start, stop, self.codec)
            if not CODECS[self.codec].lossless and kv.keys:
                with self._decoding:
                    self._decode(data, start, stop)
            return data

        return self._put(self.keys[stop], start, stop, encode)

    def _put(self, key: str, start: int, stop: int, encode: Callable[[], bytes]) -> ChunkEntry:
        data = encode()
        parts = chunk_parts(data) if start < stop else (len(data),)
        entry = describe_chunk(key, start, stop, data, parts)
        began = time.perf_counter()
        self.place.store.put(entry.object_key, data)
        seconds = time.perf_counter() - began
        self.put_s, self.put_bytes = self.put_s + seconds, self.put_bytes + len(data)
        note_chunk(self.codec, len(data), seconds)
        with self.place.database.writing() as session:
            add_chunk(session, self.fingerprint.tenant, entry, utc_now())
        return entry

    def _decode(self, data: bytes, start: int, stop: int) -> None:
        engine = self.place.engine
        dtype, device = engine.identity.kv_dtype, str(engine.model.device)
        decode_chunk(data, self.stored, start, stop, codec=self.codec, dtype=dtype, device=device)


def state_stops(stops: tuple[int, ...]) -> list[int]:
    """The first stop at or behind every STATE_TOKENS tokens, and the last one."""
    found = [stop for before, stop in pairwise((0, *stops)) if before // STATE_TOKENS < stop // STATE_TOKENS]
    return sorted({*found, stops[-1]})


def _entry(row: ChunkRow, start: int, stop: int) -> ChunkEntry:
    return ChunkEntry(
        key=row.chunk_key,
        start=start,
        stop=stop,
        size_bytes=row.size_bytes,
        xxh3=row.xxh3,
        sha256=row.sha256,
        parts=tuple(Part(*part) for part in row.parts or ()),
    )
