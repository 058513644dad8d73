"""The stored chunks of one prefix in one codec: read back what is there, store what is missing."""

import logging
import threading
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from kernels.codecs import CODECS, decode_chunk, encode_chunk
from kernels.errors import ChunkMismatch
from kernels.kv import PrefixKV
from storage.database import utc_now
from storage.errors import ObjectMissing, SnapshotCorrupt
from storage.fingerprint import Fingerprint, chunk_keys
from storage.manifest import ChunkEntry, describe_chunk
from storage.snapshots import add_chunk, forget_chunk, get_chunks, known_chunks
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
CHUNKS_IN_FLIGHT = 2


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
        self.keys = chunk_keys(root, self.ids, self.place.engine.settings.chunk_tokens)

    def load(self) -> None:
        """Fills `stored` from the leading chunks that are stored already: of an earlier attempt that was cut off, or
        of a document with the same beginning. A damaged chunk ends the run and is forgotten."""
        size = self.place.engine.settings.chunk_tokens
        with self.place.database.reading() as session:
            rows = known_chunks(session, self.keys)
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
        try:
            for entry, data in get_chunks(self.place.store, found):
                self._decode(data, entry.start, entry.stop)
                self.stored.length = entry.stop
                self.entries[entry.start // size] = entry
        except (SnapshotCorrupt, ObjectMissing, ChunkMismatch) as exc:
            logger.warning("stored chunk is damaged", extra={"reason": type(exc).__name__})
            with self.place.database.writing() as session:
                forget_chunk(session, found[len(self.entries)].key)

    def store(self, pool: Executor, kv: PrefixKV, start: int, stop: int) -> None:
        """Begins to store the chunk, unless it is there; waits where too many are under way."""
        index = start // self.place.engine.settings.chunk_tokens
        if index in self.entries:
            return
        self._storing[index] = pool.submit(self._put, self.keys[index], kv, start, stop)
        if index - CHUNKS_IN_FLIGHT in self._storing:
            self._storing[index - CHUNKS_IN_FLIGHT].result()

    def finish(self) -> tuple[ChunkEntry, ...]:
        """All chunks in order, once they are stored."""
        self.entries |= {index: future.result() for index, future in self._storing.items()}
        self.stored.length = len(self.ids)
        return tuple(self.entries[index] for index in range(len(self.keys)))

    def _put(self, key: str, kv: PrefixKV, start: int, stop: int) -> ChunkEntry:
        data = encode_chunk(kv, start, stop, self.codec)
        entry = describe_chunk(key, start, stop, data)
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
