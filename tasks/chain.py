"""The stored chunks of one prefix in one codec: read back what is there, store what is missing."""

import logging
import threading
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kernels.codecs import CODECS, chunk_parts, decode_chunk, encode_chunk
from kernels.errors import ChunkMismatch
from kernels.kv import PrefixKV
from storage.database import utc_now
from storage.errors import ObjectMissing, SnapshotCorrupt
from storage.fingerprint import Fingerprint, chunk_keys
from storage.manifest import ChunkEntry, Part, describe_chunk
from storage.snapshots import add_chunk, forget_chunk, known_chunks
from tasks.loading import load_run
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)


@dataclass
class ChunkChain:
    """Chunk keys depend on the codec that the chunks are really in, so one key never stands for two kinds of bytes.

    `stored` receives what a reader will decode. A chunk is never stored over one that is known and whole: other
    snapshots may hold that one's digest.
    """

    place: Workplace
    fingerprint: Fingerprint
    ids: list[int]
    codec: str
    stored: PrefixKV
    entries: dict[int, ChunkEntry] = field(default_factory=dict)
    _storing: dict[int, Future[ChunkEntry]] = field(default_factory=dict)
    _decoding: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        root = replace(self.fingerprint, codec=self.codec).chain_root()
        self.stops = self.place.engine.chunk_stops(len(self.ids))
        self.keys = chunk_keys(root, self.ids, self.stops)

    def load(self) -> None:
        """Fills `stored` from the leading chunks that are stored already: of an earlier attempt that was cut off, or
        of a document with the same beginning. A damaged chunk ends the run and is forgotten."""
        with self.place.database.reading() as session:
            rows = known_chunks(session, self.keys)
        found = [
            ChunkEntry(
                key=row.chunk_key,
                start=start,
                stop=stop,
                size_bytes=row.size_bytes,
                xxh3=row.xxh3,
                sha256=row.sha256,
                parts=tuple(Part(*part) for part in row.parts or ()),
            )
            for row, (start, stop) in zip(rows, pairwise((0, *self.stops)), strict=False)
        ]
        while found:
            try:
                load_run(self.place, self.stored, found, self.codec)
            except (SnapshotCorrupt, ObjectMissing) as exc:
                logger.warning("stored chunk is damaged", extra={"reason": type(exc).__name__})
                damaged = next(at for at, entry in enumerate(found) if entry.object_key == exc.key)
            except ChunkMismatch as exc:
                logger.warning("stored chunk does not fit", extra={"reason": str(exc)})
                damaged = 0
            else:
                self.entries = {entry.stop: entry for entry in found}
                return
            with self.place.database.writing() as session:
                forget_chunk(session, found[damaged].key)
            found = found[:damaged]

    def store(self, pool: Executor, kv: PrefixKV, start: int, stop: int) -> None:
        """Begins to store the chunk, unless it is there, once the one before is stored."""
        if stop in self.entries or stop in self._storing:
            return
        for earlier in self._storing.values():
            earlier.result()
        key = self.keys[self.stops.index(stop)]
        self._storing[stop] = pool.submit(self._put, key, kv, start, stop)

    def finish(self) -> tuple[ChunkEntry, ...]:
        """All chunks in order, once they are stored."""
        self.entries |= {stop: future.result() for stop, future in self._storing.items()}
        self.stored.length = len(self.ids)
        return tuple(self.entries[stop] for stop in self.stops)

    def _put(self, key: str, kv: PrefixKV, start: int, stop: int) -> ChunkEntry:
        data = encode_chunk(kv, start, stop, self.codec)
        entry = describe_chunk(key, start, stop, data, chunk_parts(data))
        if not CODECS[self.codec].lossless:
            with self._decoding:
                self._decode(data, start, stop)
        self.place.store.put(entry.object_key, data)
        with self.place.database.writing() as session:
            add_chunk(session, self.fingerprint.tenant, entry, utc_now())
        return entry

    def _decode(self, data: bytes, start: int, stop: int) -> None:
        engine = self.place.engine
        dtype, device = engine.identity.kv_dtype, str(engine.model.device)
        decode_chunk(data, self.stored, start, stop, codec=self.codec, dtype=dtype, device=device)
