"""Snapshots: one writer at a time, published whole, proved on every load."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from storage.errors import ObjectMissing, SnapshotCorrupt, SnapshotMissing
from storage.fingerprint import Fingerprint
from storage.inserting import insert_new
from storage.lineage import Event, note_event
from storage.manifest import ChunkEntry, Manifest, chunk_object_key, manifest_object_key
from storage.objects import ObjectStore
from storage.schema import (
    GONE_STATES,
    ChunkRow,
    ItemRow,
    JobRow,
    ReadingRow,
    SnapshotChunkRow,
    SnapshotRow,
    SnapshotState,
)


@dataclass(frozen=True)
class WriteClaim:
    """The right to write a snapshot, good while the row's fence is this one."""

    snapshot_id: int
    fence: int
    attempt: int


def find_or_create(session: Session, fingerprint: Fingerprint, *, num_tokens: int, now: datetime) -> SnapshotRow:
    """The one row of this fingerprint, made if it is not there."""
    key = {
        "tenant": fingerprint.tenant,
        "document_id": fingerprint.document_id,
        "fingerprint": fingerprint.digest(),
    }
    new = {
        "fields": fingerprint.fields(),
        "state": SnapshotState.WRITING,
        "fence": 0,
        "attempts": 0,
        "num_tokens": num_tokens,
        "done_tokens": 0,
        "computed_tokens": 0,
        "size_bytes": 0,
        "created_at": now,
    }
    insert_new(session, SnapshotRow, [{**key, **new}])
    return session.scalars(select(SnapshotRow).filter_by(**key)).one()


def get_snapshot(session: Session, snapshot_id: int) -> SnapshotRow:
    """
    Raises:
        SnapshotMissing: no such row.
    """
    row = session.get(SnapshotRow, snapshot_id)
    if row is None:
        raise SnapshotMissing(str(snapshot_id))
    return row


def known_manifests(session: Session, snapshot_ids: Collection[int]) -> dict[int, str | None]:
    """Those of the snapshots that were not forgotten, each with the digest of its manifest, if it is in use."""
    rows = session.execute(
        select(SnapshotRow.snapshot_id, SnapshotRow.manifest_sha256, SnapshotRow.state).where(
            SnapshotRow.snapshot_id.in_(snapshot_ids), SnapshotRow.state.not_in(GONE_STATES)
        )
    )
    return {row.snapshot_id: row.manifest_sha256 if row.state == SnapshotState.READY else None for row in rows}


def require_snapshot(session: Session, tenant: str, snapshot_id: int) -> SnapshotRow:
    """
    Raises:
        SnapshotMissing: this tenant has no such snapshot.
    """
    row = get_snapshot(session, snapshot_id)
    if row.tenant != tenant:
        raise SnapshotMissing(str(snapshot_id))
    return row


def claim_writing(
    session: Session, snapshot_id: int, *, owner: str, now: datetime, lease_s: float
) -> WriteClaim | None:
    """Makes `owner` the writer, unless the snapshot is ready or somebody else's lease still runs."""
    row = session.execute(
        update(SnapshotRow)
        .where(
            SnapshotRow.snapshot_id == snapshot_id,
            or_(
                SnapshotRow.state.in_((SnapshotState.QUARANTINED, SnapshotState.FAILED, *GONE_STATES)),
                and_(
                    SnapshotRow.state == SnapshotState.WRITING,
                    or_(SnapshotRow.owner.is_(None), SnapshotRow.lease_until < now),
                ),
            ),
        )
        .values(
            state=SnapshotState.WRITING,
            owner=owner,
            lease_until=now + timedelta(seconds=lease_s),
            claimed_at=now,
            fence=SnapshotRow.fence + 1,
            attempts=SnapshotRow.attempts + 1,
            done_tokens=0,
            error=None,
        )
        .returning(SnapshotRow.fence, SnapshotRow.attempts)
    ).one_or_none()
    return None if row is None else WriteClaim(snapshot_id, row.fence, row.attempts)


def renew_writing(session: Session, owner: str, *, now: datetime, lease_s: float) -> None:
    session.execute(
        update(SnapshotRow)
        .where(SnapshotRow.owner == owner, SnapshotRow.state == SnapshotState.WRITING)
        .values(lease_until=now + timedelta(seconds=lease_s))
    )


def is_writer(session: Session, claim: WriteClaim) -> bool:
    """Whether nobody has overtaken this writer."""
    return session.scalar(select(SnapshotRow.snapshot_id).where(_still_writing(claim))) is not None


def note_progress(session: Session, claim: WriteClaim, done_tokens: int) -> None:
    session.execute(update(SnapshotRow).where(_still_writing(claim)).values(done_tokens=done_tokens))


def abandon_writing(
    session: Session, claim: WriteClaim, *, state: SnapshotState, error: str | None, is_attempt: bool = True
) -> None:
    """Lets the snapshot go: WRITING for the next writer at once; FAILED with the reason, and whoever asks for it
    later starts counting attempts anew. What was no attempt is not counted as one. Nothing happens to what another
    writer took over or this one published."""
    values: dict[str, Any] = {"state": state, "owner": None, "lease_until": None, "error": error}
    if state == SnapshotState.FAILED:
        values["attempts"] = 0
    elif not is_attempt:
        values["attempts"] = SnapshotRow.attempts - 1
    session.execute(update(SnapshotRow).where(_still_writing(claim)).values(values))


def _still_writing(claim: WriteClaim) -> ColumnElement[bool]:
    return and_(
        SnapshotRow.snapshot_id == claim.snapshot_id,
        SnapshotRow.fence == claim.fence,
        SnapshotRow.state == SnapshotState.WRITING,
    )


def known_chunks(session: Session, keys: list[str]) -> list[ChunkRow]:
    """Rows of the leading run of `keys` that is stored; ends at the first that is not."""
    found = stored_chunks(session, keys)
    run = []
    for key in keys:
        if key not in found:
            break
        run.append(found[key])
    return run


def stored_chunks(session: Session, keys: Collection[str]) -> dict[str, ChunkRow]:
    """Those of the chunks and states that are stored, by key."""
    return {row.chunk_key: row for row in session.scalars(select(ChunkRow).where(ChunkRow.chunk_key.in_(keys)))}


def forget_chunk(session: Session, key: str) -> None:
    """Takes a damaged chunk's row away, so that nothing builds on it again."""
    session.execute(delete(SnapshotChunkRow).where(SnapshotChunkRow.chunk_key == key))
    session.execute(delete(ChunkRow).where(ChunkRow.chunk_key == key))


def add_chunk(session: Session, tenant: str, entry: ChunkEntry, now: datetime) -> None:
    """Writes the row of a chunk that has been stored, or replaces what an earlier writer noted of it."""
    new = {
        "tenant": tenant,
        "num_tokens": entry.stop - entry.start,
        "size_bytes": entry.size_bytes,
        "xxh3": entry.xxh3,
        "sha256": entry.sha256,
        "parts": [list(part) for part in entry.parts],
        "created_at": now,
    }
    # Two documents with the same beginning may be written at the same time.
    insert_new(session, ChunkRow, [{"chunk_key": entry.key, **new}])
    session.execute(update(ChunkRow).where(ChunkRow.chunk_key == entry.key).values(**new))


def publish(
    session: Session,
    claim: WriteClaim,
    manifest: Manifest,
    *,
    manifest_sha256: str,
    computed_tokens: int,
    prefill_s: float,
    now: datetime,
    put_s: float | None = None,
    put_bytes: int | None = None,
    event: Event | None = None,
) -> bool:
    """Marks the snapshot ready, after its chunks and manifest are stored. False: another writer overtook this one.

    Raises:
        ObjectMissing: a stored chunk that it was built on has been swept meanwhile.
    """
    _hold_chunks(session, [entry.key for entry in manifest.objects])
    was_ready = session.scalar(select(SnapshotRow.ready_at).where(SnapshotRow.snapshot_id == claim.snapshot_id))
    row = session.execute(
        update(SnapshotRow)
        .where(_still_writing(claim))
        .values(
            state=SnapshotState.READY,
            owner=None,
            lease_until=None,
            done_tokens=manifest.num_tokens,
            computed_tokens=computed_tokens,
            size_bytes=sum(entry.size_bytes for entry in manifest.objects),
            manifest_sha256=manifest_sha256,
            prefill_s=prefill_s,
            put_s=put_s,
            put_bytes=put_bytes,
            ready_at=now,
            last_used_at=now,
            expires_at=None,
        )
        .returning(SnapshotRow.tenant, SnapshotRow.document_id)
    ).one_or_none()
    if row is None:
        return False
    note_event(
        session,
        event or (Event.RECOMPUTED if was_ready else Event.PUBLISHED),
        tenant=row.tenant,
        document_id=row.document_id,
        snapshot_id=claim.snapshot_id,
        now=now,
        detail=f"{computed_tokens} of {manifest.num_tokens} tokens computed",
    )
    session.execute(delete(SnapshotChunkRow).where(SnapshotChunkRow.snapshot_id == claim.snapshot_id))
    session.execute(
        insert(SnapshotChunkRow),
        [
            {"snapshot_id": claim.snapshot_id, "position": position, "chunk_key": entry.key}
            for position, entry in enumerate(manifest.objects)
        ],
    )
    return True


def _hold_chunks(session: Session, keys: list[str]) -> None:
    """Keeps the chunks' rows from the sweep until this transaction ends."""
    held = session.scalars(
        select(ChunkRow.chunk_key)
        .where(ChunkRow.chunk_key.in_(keys))
        .order_by(ChunkRow.chunk_key)
        .with_for_update(read=True, key_share=True)
    ).all()
    for key in keys:
        if key not in held:
            raise ObjectMissing(chunk_object_key(key))


def note_readings(
    session: Session,
    row: SnapshotRow,
    *,
    model: str,
    computed_tokens: int,
    prefill_s: float,
    now: datetime,
    is_stored: bool = True,
) -> None:
    """Records for each job of this model with open items of the document how it came by the snapshot; the first
    record stays.

    The tokens computed are charged to the oldest of the jobs without a record, so that the records add up to what
    was done; where a damaged snapshot is written again for jobs that all have one, nothing is added.
    """
    recorded = select(ReadingRow.job_id).where(ReadingRow.document_id == row.document_id)
    job_ids = session.scalars(
        select(ItemRow.job_id)
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .where(
            JobRow.model == model,
            ItemRow.tenant == row.tenant,
            ItemRow.document_id == row.document_id,
            ItemRow.finished_at.is_(None),
            ItemRow.job_id.not_in(recorded),
        )
        .group_by(ItemRow.job_id)
        .order_by(func.min(ItemRow.item_id))
    ).all()
    way = "computed" if is_stored else "one_piece"
    readings = []
    of_jobs = session.execute(
        select(ItemRow.job_id, func.count())
        .where(ItemRow.job_id.in_(job_ids), ItemRow.document_id == row.document_id)
        .group_by(ItemRow.job_id)
    )
    num_items = {row[0]: row[1] for row in of_jobs}
    for job_id in job_ids:
        readings.append(
            {
                "job_id": job_id,
                "document_id": row.document_id,
                "snapshot_id": row.snapshot_id,
                "way": way if computed_tokens else "found",
                "computed_tokens": computed_tokens,
                "reused_tokens": row.num_tokens - computed_tokens,
                "prefill_s": prefill_s,
                "num_items": num_items[job_id],
                "created_at": now,
            }
        )
        computed_tokens, prefill_s = 0, 0.0
    insert_new(session, ReadingRow, readings)


def note_used(session: Session, snapshot_id: int, now: datetime) -> None:
    """Records a whole and proved load. Only this forgets earlier attempts: a store that damages whatever is written
    to it does not get the document written again for ever."""
    session.execute(
        update(SnapshotRow).where(SnapshotRow.snapshot_id == snapshot_id).values(attempts=0, last_used_at=now)
    )


def quarantine(session: Session, snapshot_id: int, reason: str) -> None:
    """Takes a damaged snapshot out of use. It is written again by the next prefill."""
    row = session.execute(
        update(SnapshotRow)
        .where(SnapshotRow.snapshot_id == snapshot_id, SnapshotRow.state == SnapshotState.READY)
        .values(state=SnapshotState.QUARANTINED, error=reason)
        .returning(SnapshotRow.tenant, SnapshotRow.document_id)
    ).one_or_none()
    if row is not None:
        note_event(
            session,
            Event.QUARANTINED,
            tenant=row.tenant,
            document_id=row.document_id,
            snapshot_id=snapshot_id,
            now=datetime.now(UTC),
            detail=reason,
        )


def put_manifest(store: ObjectStore, row: SnapshotRow, manifest: Manifest) -> str:
    """Stores the manifest, after all its chunks; returns its SHA-256."""
    data = manifest.encode()
    store.put(manifest_object_key(row.tenant, row.document_id, row.fingerprint), data)
    return sha256(data).hexdigest()


def get_manifest(store: ObjectStore, row: SnapshotRow) -> Manifest:
    """The manifest of a ready snapshot.

    Raises:
        SnapshotCorrupt: it is not the one that was published.
        ObjectMissing: it is gone.
    """
    key = manifest_object_key(row.tenant, row.document_id, row.fingerprint)
    data = store.get(key)
    if sha256(data).hexdigest() != row.manifest_sha256 and store.drop_copy(key):
        data = store.get(key)  # what was here was an earlier one
    found = sha256(data).hexdigest()
    if found != row.manifest_sha256:
        raise SnapshotCorrupt(key, expected=row.manifest_sha256 or "a digest", actual=found)
    manifest = Manifest.decode(data, key)
    if manifest.fingerprint != row.fields:
        raise SnapshotCorrupt(key, expected="the fingerprint of its row", actual="another")
    return manifest
