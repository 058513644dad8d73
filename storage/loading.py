"""Reading the chunks of a snapshot into memory, each part proved before anything is made of it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import xxhash

from storage.errors import SnapshotCorrupt
from storage.manifest import ChunkEntry, verify_chunk
from storage.objects import ObjectStore

LOAD_THREADS = 8

Result = TypeVar("Result")


class Receiver(Protocol):
    """Where the parts go. `chunk` counts the entries; [start, stop) are bytes of its object. `in_place`: the views are
    where the bytes are to stay."""

    in_place: bool

    def views(self, chunk: int, start: int, stop: int) -> Sequence[memoryview]:
        """Writable memory for the part, as large as it."""

    def accept(self, chunk: int, start: int, stop: int) -> None:
        """The views are filled, and proved to be what was stored."""


class _Part(NamedTuple):
    order: int
    chunk: int
    start: int
    stop: int
    xxh3: str


def load_chunks(
    store: ObjectStore, entries: Sequence[ChunkEntry], receiver: Receiver, *, threads: int = LOAD_THREADS
) -> None:
    """Hands every part of every chunk to the receiver, from several threads: the first layers of all chunks first.
    Where it does not take them in place, no more than two chunks are under way.

    Raises:
        SnapshotCorrupt, ObjectMissing: a chunk is not as it was published; the receiver has then got only a part.
    """
    parts = _parts(entries)
    if not receiver.in_place:
        largest = max((part.stop - part.start for part in parts), default=1)
        threads = min(threads, max(1, 2 * max((entry.size_bytes for entry in entries), default=1) // largest))
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        reading = [pool.submit(_read, store, entries[part.chunk], part, receiver) for part in parts]
        try:
            done, _ = wait(reading, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            for future in reading:
                future.cancel()


def _parts(entries: Sequence[ChunkEntry]) -> list[_Part]:
    parts = []
    for chunk, entry in enumerate(entries):
        start = 0
        for index, (stop, xxh3) in enumerate(entry.parts):
            parts.append(_Part(index, chunk, start, stop, xxh3))
            start = stop
        if start != entry.size_bytes:
            raise SnapshotCorrupt(entry.object_key, expected=f"parts of {entry.size_bytes} bytes", actual=f"{start}")
    return sorted(parts)


def _read(store: ObjectStore, entry: ChunkEntry, part: _Part, receiver: Receiver) -> None:
    views = receiver.views(part.chunk, part.start, part.stop)
    _twice(store, entry, lambda: _fill(store, entry, part, views))
    receiver.accept(part.chunk, part.start, part.stop)


def _fill(store: ObjectStore, entry: ChunkEntry, part: _Part, views: Sequence[memoryview]) -> None:
    size_bytes = store.read_into(entry.object_key, part.start, views)
    if size_bytes != entry.size_bytes:
        raise SnapshotCorrupt(entry.object_key, expected=f"{entry.size_bytes} bytes", actual=f"{size_bytes} bytes")
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    if digest.hexdigest() != part.xxh3:
        raise SnapshotCorrupt(entry.object_key, expected=part.xxh3, actual=digest.hexdigest())


def get_chunks(store: ObjectStore, entries: Sequence[ChunkEntry]) -> Iterator[tuple[ChunkEntry, bytes]]:
    """The chunks in order, whole and verified, one at a time.

    Raises:
        SnapshotCorrupt, ObjectMissing: of the first chunk that is not as published.
    """
    for entry in entries:
        yield entry, _twice(store, entry, partial(_get, store, entry))


def _get(store: ObjectStore, entry: ChunkEntry) -> bytes:
    data = store.get(entry.object_key)
    verify_chunk(entry, data)
    return data


def _twice(store: ObjectStore, entry: ChunkEntry, read: Callable[[], Result]) -> Result:
    """Once more from the store where what came was a nearer copy, and damaged."""
    try:
        return read()
    except SnapshotCorrupt:
        if not store.drop_copy(entry.object_key):
            raise
        return read()
