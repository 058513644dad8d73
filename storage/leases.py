"""Leases on snapshots: a row per reader, good until its time; a dead reader's runs out."""

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, exists, select, update
from sqlalchemy.orm import Session

from storage.schema import SnapshotLeaseRow, SnapshotRow, SnapshotState


def take_lease(session: Session, snapshot_id: int, *, owner: str, now: datetime, lease_s: float, ttl_s: float) -> bool:
    """Holds a ready snapshot for `owner` and counts as a use: it lives `ttl_s` from now. False: it is not ready."""
    used = session.scalar(
        update(SnapshotRow)
        .where(SnapshotRow.snapshot_id == snapshot_id, SnapshotRow.state == SnapshotState.READY)
        .values(last_used_at=now, expires_at=now + timedelta(seconds=ttl_s))
        .returning(SnapshotRow.snapshot_id)
    )
    if used is None:
        return False
    session.merge(SnapshotLeaseRow(snapshot_id=snapshot_id, owner=owner, expires_at=now + timedelta(seconds=lease_s)))
    return True


def renew_leases(session: Session, owner: str, *, now: datetime, lease_s: float) -> None:
    session.execute(
        update(SnapshotLeaseRow)
        .where(SnapshotLeaseRow.owner == owner)
        .values(expires_at=now + timedelta(seconds=lease_s))
    )


def release_leases(session: Session, owner: str) -> None:
    session.execute(delete(SnapshotLeaseRow).where(SnapshotLeaseRow.owner == owner))


def drop_dead_leases(session: Session, *, now: datetime) -> None:
    session.execute(delete(SnapshotLeaseRow).where(SnapshotLeaseRow.expires_at < now))


def is_leased(now: datetime) -> ColumnElement[bool]:
    """Of a snapshot row in a query: a lease on it still runs."""
    return (
        exists()
        .where(SnapshotLeaseRow.snapshot_id == SnapshotRow.snapshot_id, SnapshotLeaseRow.expires_at >= now)
        .correlate(SnapshotRow)
    )


def live_leases(session: Session, snapshot_id: int, *, now: datetime) -> list[SnapshotLeaseRow]:
    return list(
        session.scalars(
            select(SnapshotLeaseRow)
            .where(SnapshotLeaseRow.snapshot_id == snapshot_id, SnapshotLeaseRow.expires_at >= now)
            .order_by(SnapshotLeaseRow.expires_at)
        )
    )
