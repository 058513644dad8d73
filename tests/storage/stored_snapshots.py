"""Whole snapshots, rows and objects, for the tests of lifetimes."""

import os
from datetime import datetime
from pathlib import Path

from storage.database import Database
from storage.manifest import ChunkEntry, describe_chunk
from storage.objects import FolderStore, ObjectStore
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import add_chunk, claim_writing, find_or_create, get_snapshot, publish, put_manifest
from tests.storage.made_rows import DOC, NOW, fingerprint, manifest


def chunk(number: int, start: int = 0) -> tuple[ChunkEntry, bytes]:
    data = bytes([number]) * 100
    return describe_chunk(f"{number:064x}", start, start + 4, data, [60, 100]), data


def store_chunk(
    database: Database, store: ObjectStore, number: int, start: int = 0, *, tenant: str = "acme", now: datetime = NOW
) -> ChunkEntry:
    entry, data = chunk(number, start)
    store.put(entry.object_key, data)
    with database.writing() as session:
        add_chunk(session, tenant, entry, now)
    return entry


def store_snapshot(
    database: Database,
    store: ObjectStore,
    *numbers: int,
    tenant: str = "acme",
    document_id: str = DOC,
    now: datetime = NOW,
) -> int:
    """A ready snapshot of these chunks, 100 bytes each; returns its id."""
    own = fingerprint(tenant=tenant, document_id=document_id)
    with database.writing() as session:
        row = find_or_create(session, own, num_tokens=4 * len(numbers), now=now)
        claim = claim_writing(session, row.snapshot_id, owner="w1", now=now, lease_s=60)
    assert claim is not None
    entries = tuple(
        store_chunk(database, store, number, 4 * position, tenant=tenant, now=now)
        for position, number in enumerate(numbers)
    )
    made = manifest(entries, fingerprint=own.fields())
    digest = put_manifest(store, row, made)
    with database.writing() as session:
        assert publish(session, claim, made, manifest_sha256=digest, computed_tokens=8, prefill_s=2.0, now=now)
    return row.snapshot_id


def state_of(database: Database, snapshot_id: int) -> SnapshotState:
    return SnapshotState(look(database, snapshot_id).state)


def look(database: Database, snapshot_id: int) -> SnapshotRow:
    with database.reading() as session:
        return get_snapshot(session, snapshot_id)


def objects(store: FolderStore) -> set[str]:
    """Short names of what is stored: numbers of chunks, `manifest` for each manifest, `text` for each text."""
    found = set()
    for key in store.keys(""):
        kind, _, name = key.partition("/")
        found.add(str(int(name[:64], 16)) if kind == "chunks" else f"{kind.removesuffix('s')} {name.split('/')[0]}")
    return found


def make_old(folder: Path, at: datetime) -> None:
    """Gives all objects this time of their last put."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (at.timestamp(), at.timestamp()))
