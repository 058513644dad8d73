"""Snapshots that questions wait for."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from storage.leases import is_leased
from storage.schema import ItemRow, ItemState, JobRow, SnapshotRow, SnapshotState


def next_waiting_snapshot(
    session: Session, *, model: str, passed_over: Collection[int], now: datetime
) -> SnapshotRow | None:
    """The oldest ready snapshot that nobody reads while questions for the model wait for its document; not one of
    `passed_over`."""
    waiting = (
        exists()
        .where(
            ItemRow.tenant == SnapshotRow.tenant,
            ItemRow.document_id == SnapshotRow.document_id,
            ItemRow.state == ItemState.QUEUED,
            JobRow.job_id == ItemRow.job_id,
            JobRow.model == model,
            JobRow.cancelled_at.is_(None),
        )
        .correlate(SnapshotRow)
    )
    return session.scalar(
        select(SnapshotRow)
        .where(
            SnapshotRow.state == SnapshotState.READY,
            SnapshotRow.snapshot_id.not_in(passed_over),
            ~is_leased(now),
            waiting,
        )
        .order_by(SnapshotRow.snapshot_id)
        .limit(1)
    )
