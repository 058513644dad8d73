"""Deletes objects that no snapshot needs any more.

A snapshot's row stops being ready first (retention), then its manifest goes, then the rows of its chunks, then their
objects: cut off anywhere, what is left looks like nothing, and the next sweep finds it. Several may sweep at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from storage.database import Database
from storage.documents import text_key
from storage.leases import is_leased
from storage.manifest import chunk_key_of, chunk_object_key, manifest_object_key
from storage.objects import ObjectStore, StoredObject, copies_of
from storage.retention import Lifetimes
from storage.schema import GONE_STATES, ChunkRow, DocumentRow, SnapshotChunkRow, SnapshotRow, SnapshotState

AT_ONCE = 500


@dataclass(frozen=True)
class Swept:
    """What a sweep deleted, or would delete. Orphans are objects without a row; uploads are interrupted puts."""

    manifests: int
    chunks: int
    chunk_bytes: int
    orphans: int
    orphan_bytes: int
    uploads: int


def sweep(
    database: Database, store: ObjectStore, lifetimes: Lifetimes, *, now: datetime, dry_run: bool = False
) -> Swept:
    """Deletes what expired or removed snapshots held alone, and objects that have no row. Repeatable.

    What is younger than the grace time stays: its writer may be about to publish it. Copies of what is gone go too,
    on this host.
    """
    older_than = now - timedelta(seconds=lifetimes.grace_s)
    with database.reading() as session:
        gone = session.scalars(select(SnapshotRow.snapshot_id).where(_is_sweepable(now))).all()
    if not dry_run:
        for snapshot_id in gone:
            _delete_manifest(database, store, snapshot_id, now)
    chunks, chunk_bytes = _sweep_chunks(database, store, older_than, now, dry_run=dry_run)
    orphans, orphan_bytes = _sweep_orphans(database, store, older_than, dry_run=dry_run)
    uploads = 0 if dry_run else store.sweep(lifetimes.grace_s)
    if not dry_run:
        prune_copies(database, store)
    return Swept(len(gone), chunks, chunk_bytes, orphans, orphan_bytes, uploads)


def prune_copies(database: Database, store: ObjectStore) -> int:
    """Deletes this host's copies of what has no row any more, whichever host forgot it. Returns how many."""

    def known(keys: list[str]) -> set[str]:
        with database.reading() as session:
            return _known_objects(session, keys)

    return sum(copies.prune(known) for copies in copies_of(store))


def _is_sweepable(now: datetime) -> ColumnElement[bool]:
    return and_(SnapshotRow.state.in_(GONE_STATES), SnapshotRow.manifest_sha256.is_not(None), ~is_leased(now))


def _delete_manifest(database: Database, store: ObjectStore, snapshot_id: int, now: datetime) -> None:
    # The row stays locked meanwhile: a prefill that wants to write the snapshot anew puts its manifest after this.
    with database.writing() as session:
        row = session.scalar(
            select(SnapshotRow)
            .where(SnapshotRow.snapshot_id == snapshot_id, _is_sweepable(now))
            .with_for_update(of=SnapshotRow)
        )
        if row is not None:
            store.delete(manifest_object_key(row.tenant, row.document_id, row.fingerprint))
            session.execute(delete(SnapshotChunkRow).where(SnapshotChunkRow.snapshot_id == snapshot_id))
            session.execute(
                update(SnapshotRow).where(SnapshotRow.snapshot_id == snapshot_id).values(manifest_sha256=None)
            )


def _sweep_chunks(
    database: Database, store: ObjectStore, older_than: datetime, now: datetime, *, dry_run: bool
) -> tuple[int, int]:
    with database.reading() as session:
        unused = session.execute(
            select(ChunkRow.chunk_key, ChunkRow.size_bytes).where(_is_unused(now), *_is_old(session, older_than, now))
        ).all()
    if dry_run:
        return len(unused), sum(size_bytes for _, size_bytes in unused)
    sizes = dict(unused)
    deleted = delete_unused_chunks(database, store, sorted(sizes), now)
    return len(deleted), sum(sizes[key] for key in deleted)


def delete_unused_chunks(database: Database, store: ObjectStore, keys: Sequence[str], now: datetime) -> list[str]:
    """Deletes those of the chunks that no snapshot refers to: rows first, then objects. Returns their keys."""
    deleted: list[str] = []
    for start in range(0, len(keys), AT_ONCE):
        batch = keys[start : start + AT_ONCE]
        with database.writing() as session:
            # Waits for whoever is just publishing one of them; its reference is then seen by the next statement.
            session.execute(
                select(ChunkRow.chunk_key)
                .where(ChunkRow.chunk_key.in_(batch))
                .order_by(ChunkRow.chunk_key)
                .with_for_update()
            ).all()
            unused = session.scalars(
                select(ChunkRow.chunk_key).where(ChunkRow.chunk_key.in_(batch), _is_unused(now))
            ).all()
            session.execute(delete(SnapshotChunkRow).where(SnapshotChunkRow.chunk_key.in_(unused)))
            session.execute(delete(ChunkRow).where(ChunkRow.chunk_key.in_(unused)))
        # A prefill that stores the same chunk in this moment loses it: its snapshot is found damaged and made again.
        for key in unused:
            store.delete(chunk_object_key(key))
        deleted += unused
    return deleted


def _is_unused(now: datetime) -> ColumnElement[bool]:
    """No snapshot refers to the chunk, but for such as the sweep takes."""
    return ~(
        exists()
        .where(
            SnapshotChunkRow.chunk_key == ChunkRow.chunk_key,
            SnapshotRow.snapshot_id == SnapshotChunkRow.snapshot_id,
            or_(SnapshotRow.state.not_in(GONE_STATES), is_leased(now)),
        )
        .correlate(ChunkRow)
    )


def _is_old(session: Session, older_than: datetime, now: datetime) -> list[ColumnElement[bool]]:
    """Older than the grace time, and than whatever its tenant's prefills now at work have begun."""
    conditions: list[ColumnElement[bool]] = [ChunkRow.created_at < older_than]
    writers = session.execute(
        select(SnapshotRow.tenant, func.min(SnapshotRow.claimed_at))
        .where(
            SnapshotRow.state == SnapshotState.WRITING,
            SnapshotRow.lease_until >= now,
            SnapshotRow.claimed_at.is_not(None),
        )
        .group_by(SnapshotRow.tenant)
    ).all()
    for tenant, claimed_at in writers:
        conditions.append(or_(ChunkRow.tenant != tenant, ChunkRow.created_at < claimed_at))
    return conditions


def _sweep_orphans(database: Database, store: ObjectStore, older_than: datetime, *, dry_run: bool) -> tuple[int, int]:
    count, size_bytes = 0, 0
    for batch in _old_objects(store, older_than):
        with database.reading() as session:
            known = _known_objects(session, [found.key for found in batch])
        for orphan in batch:
            if orphan.key not in known:
                if not dry_run:
                    store.delete(orphan.key)
                count, size_bytes = count + 1, size_bytes + orphan.size_bytes
    return count, size_bytes


def _old_objects(store: ObjectStore, older_than: datetime) -> Iterator[list[StoredObject]]:
    old = (
        found
        for prefix in ("chunks/", "manifests/")
        for found in store.entries(prefix)
        if found.modified_at < older_than
    )
    while batch := list(islice(old, AT_ONCE)):
        yield batch


def _known_objects(session: Session, keys: list[str]) -> set[str]:
    chunk_keys = [chunk_key_of(key) for key in keys if key.startswith("chunks/")]
    known = {
        chunk_object_key(key)
        for key in session.scalars(select(ChunkRow.chunk_key).where(ChunkRow.chunk_key.in_(chunk_keys)))
    }
    fingerprints = [key.rpartition("/")[2].removesuffix(".json") for key in keys if key.startswith("manifests/")]
    rows = session.execute(
        select(SnapshotRow.tenant, SnapshotRow.document_id, SnapshotRow.fingerprint).where(
            SnapshotRow.fingerprint.in_(fingerprints),
            # The writer of a snapshot may have put its manifest and not yet noted its digest.
            or_(SnapshotRow.state.not_in(GONE_STATES), SnapshotRow.manifest_sha256.is_not(None)),
        )
    ).all()
    document_ids = [key.rpartition("/")[2].removesuffix(".txt") for key in keys if key.startswith("documents/")]
    documents = session.execute(
        select(DocumentRow.tenant, DocumentRow.document_id).where(DocumentRow.document_id.in_(document_ids))
    )
    return known | {manifest_object_key(*row) for row in rows} | {text_key(*row) for row in documents}
