"""Counts of what the rows say, over all tenants: for whoever watches the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from storage.schema import (
    COUNTS,
    ItemRow,
    ItemState,
    JobRow,
    ReadingRow,
    SnapshotLeaseRow,
    SnapshotRow,
    SnapshotState,
    UnitRow,
    WorkerRow,
)
from storage.tiers import Stage, Tier
from storage.units import is_free


@dataclass(frozen=True)
class Overview:
    """`oldest_…_s`: how long ago the oldest job began that has an item which waits for its document to be read, or to
    be answered. `units`: documents that wait to be taken up, by stage and tier: how many, and since when the oldest
    does (seconds)."""

    items: Mapping[str, int]
    snapshots: Mapping[str, int]
    snapshot_bytes: Mapping[str, int]
    readings: Mapping[str, int]
    computed_tokens: int
    reused_tokens: int
    open_jobs: int
    oldest_reading_s: float
    oldest_answering_s: float
    leases: Mapping[str, int]
    workers: Mapping[str, int]
    units: Mapping[tuple[Stage, Tier], tuple[int, float]]


def overview(session: Session, *, now: datetime, workers_seen_after: datetime) -> Overview:
    items = _items(session)
    snapshots = session.execute(
        select(SnapshotRow.state, func.count(), func.sum(SnapshotRow.size_bytes)).group_by(SnapshotRow.state)
    ).all()
    readings = session.execute(
        select(
            ReadingRow.way, func.count(), func.sum(ReadingRow.computed_tokens), func.sum(ReadingRow.reused_tokens)
        ).group_by(ReadingRow.way)
    ).all()
    workers = session.execute(
        select(WorkerRow.pool, func.count()).where(WorkerRow.seen_at >= workers_seen_after).group_by(WorkerRow.pool)
    ).all()
    return Overview(
        items=items,
        snapshots={str(state): count for state, count, _ in snapshots},
        snapshot_bytes={str(state): int(size or 0) for state, _, size in snapshots},
        readings={way: count for way, count, _, _ in readings},
        computed_tokens=sum(int(computed or 0) for _, _, computed, _ in readings),
        reused_tokens=sum(int(reused or 0) for _, _, _, reused in readings),
        open_jobs=session.scalars(select(func.count()).where(JobRow.finished_at.is_(None))).one(),
        oldest_reading_s=_oldest_s(session, now, is_read=False),
        oldest_answering_s=_oldest_s(session, now, is_read=True),
        leases={
            "items": items[ItemState.RUNNING],
            "writing": session.scalars(
                select(func.count()).where(SnapshotRow.state == SnapshotState.WRITING, SnapshotRow.lease_until >= now)
            ).one(),
            "reading": session.scalars(select(func.count()).where(SnapshotLeaseRow.expires_at >= now)).one(),
        },
        workers={str(pool): int(count) for pool, count in workers},
        units=_units(session, now),
    )


def _units(session: Session, now: datetime) -> dict[tuple[Stage, Tier], tuple[int, float]]:
    found = {(stage, tier): (0, 0.0) for stage in Stage for tier in Tier}
    waiting = session.execute(
        select(UnitRow.stage, UnitRow.tier, func.count(), func.min(UnitRow.since))
        .where(is_free(now))
        .group_by(UnitRow.stage, UnitRow.tier)
    )
    for stage, tier, count, since in waiting:
        found[Stage(stage), Tier(tier)] = (count, max(0.0, (now - since).total_seconds()))
    return found


def _items(session: Session) -> dict[str, int]:
    """By state, from the counts that jobs keep; only what runs or is held is counted in the items."""
    ended = {state: func.coalesce(func.sum(getattr(JobRow, column)), 0) for state, column in COUNTS.items()}
    still_open, *counts = session.execute(select(func.coalesce(func.sum(JobRow.num_open), 0), *ended.values())).one()
    begun = {
        state: session.scalars(select(func.count()).where(ItemRow.state == state)).one()
        for state in (ItemState.RUNNING, ItemState.HELD)
    }
    queued = int(still_open) - sum(begun.values())
    found = {ItemState.QUEUED: queued, **begun, **dict(zip(ended, map(int, counts), strict=True))}
    return {state.value: found[state] for state in ItemState}


def _oldest_s(session: Session, now: datetime, *, is_read: bool) -> float:
    ready = exists().where(
        SnapshotRow.tenant == ItemRow.tenant,
        SnapshotRow.document_id == ItemRow.document_id,
        SnapshotRow.state == SnapshotState.READY,
    )
    waiting = exists().where(
        ItemRow.job_id == JobRow.job_id, ItemRow.state == ItemState.QUEUED, ready if is_read else ~ready
    )
    since = func.coalesce(JobRow.not_before, JobRow.created_at)
    oldest = session.scalars(
        select(since).where(JobRow.finished_at.is_(None), waiting).order_by(since).limit(1)
    ).first()
    return 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds())
