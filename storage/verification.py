"""Proving stored snapshots, byte for byte, without loading them into a model."""

from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.errors import ObjectMissing, SnapshotCorrupt
from storage.manifest import ChunkEntry, verify_chunk
from storage.objects import ObjectStore, without_copies
from storage.schema import ChunkRow, SnapshotChunkRow, SnapshotRow
from storage.snapshots import get_manifest


@dataclass(frozen=True)
class Verified:
    """`problems` name each object that is missing or not as published; empty: every byte proved right."""

    num_chunks: int
    size_bytes: int
    problems: tuple[str, ...]


def chunk_digests(session: Session, snapshot_id: int) -> dict[str, str]:
    """SHA-256 of the snapshot's chunks by key, as the database has them."""
    rows = session.execute(
        select(ChunkRow.chunk_key, ChunkRow.sha256)
        .join(SnapshotChunkRow, SnapshotChunkRow.chunk_key == ChunkRow.chunk_key)
        .where(SnapshotChunkRow.snapshot_id == snapshot_id)
    ).all()
    return dict(rows)


def verify_snapshot(store: ObjectStore, row: SnapshotRow, digests: dict[str, str]) -> Verified:
    """Reads the manifest and every chunk again. An object store that does not answer is no problem of the snapshot.

    Raises:
        ObjectStoreError: the store cannot be read; nothing is said about the snapshot.
    """
    store = without_copies(store)
    try:
        manifest = get_manifest(store, row)
    except (ObjectMissing, SnapshotCorrupt) as exc:
        return Verified(0, 0, (str(exc),))
    problems = []
    size_bytes = 0
    for entry in manifest.objects:
        try:
            size_bytes += _verify(store, entry, digests)
        except (ObjectMissing, SnapshotCorrupt) as exc:
            problems.append(str(exc))
    return Verified(len(manifest.objects), size_bytes, tuple(problems))


def _verify(store: ObjectStore, entry: ChunkEntry, digests: dict[str, str]) -> int:
    expected = digests.get(entry.key)
    if expected is None:
        raise SnapshotCorrupt(entry.object_key, expected="a row in the database", actual="none")
    data = store.get(entry.object_key)
    verify_chunk(entry, data)
    found = sha256(data).hexdigest()
    if not found == entry.sha256 == expected:
        raise SnapshotCorrupt(entry.object_key, expected=expected, actual=found)
    return len(data)
