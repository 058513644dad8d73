"""How long snapshots live. Here only rows change; objects are deleted by the sweep."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, update
from sqlalchemy.orm import Session

from storage.errors import SnapshotInUse
from storage.leases import drop_dead_leases, is_leased
from storage.lineage import Event, note_event
from storage.schema import (
    GONE_STATES,
    OPEN_STATES,
    ChunkRow,
    ItemRow,
    SnapshotChunkRow,
    SnapshotRow,
    SnapshotState,
)
from storage.settings import StorageSettings
from storage.snapshots import require_snapshot

# No writer is at them. What is being written is its writer's, while that one lives.
_RESTING_STATES = (SnapshotState.READY, SnapshotState.QUARANTINED, SnapshotState.FAILED)


@dataclass(frozen=True)
class Lifetimes:
    """How long what is kept: see the settings of the same names."""

    ttl_s: float
    max_age_s: float
    grace_s: float
    budget_bytes: int | None = None

    @classmethod
    def of(cls, settings: StorageSettings) -> "Lifetimes":
        return cls(
            ttl_s=settings.snapshot_ttl_s,
            max_age_s=settings.snapshot_max_age_s,
            grace_s=settings.sweep_grace_s,
            budget_bytes=None if settings.store_budget_mb is None else settings.store_budget_mb * 10**6,
        )

    def end_of(self, row: SnapshotRow) -> datetime | None:
        """When the snapshot expires if nobody uses or needs it; None where its time has not begun."""
        ends = [] if row.ready_at is None else [row.ready_at + timedelta(seconds=self.max_age_s)]
        if row.expires_at is not None and not row.pinned:
            ends.append(row.expires_at)
        return min(ends, default=None)


def pin(session: Session, tenant: str, snapshot_id: int, *, now: datetime) -> None:
    """Keeps a snapshot from the TTL and the budget; its maximum age still ends it."""
    _set_pinned(session, tenant, snapshot_id, pinned=True, event=Event.PINNED, now=now)


def unpin(session: Session, tenant: str, snapshot_id: int, *, now: datetime) -> None:
    _set_pinned(session, tenant, snapshot_id, pinned=False, event=Event.UNPINNED, now=now)


def _set_pinned(session: Session, tenant: str, snapshot_id: int, *, pinned: bool, event: Event, now: datetime) -> None:
    row = require_snapshot(session, tenant, snapshot_id)
    if row.pinned != pinned:
        session.execute(update(SnapshotRow).where(SnapshotRow.snapshot_id == snapshot_id).values(pinned=pinned))
        _note(session, event, row, now)


def remove(session: Session, tenant: str, snapshot_id: int, *, now: datetime) -> None:
    """Takes a snapshot out of use for good; the sweep deletes its objects, and a later job writes it anew.

    Raises:
        SnapshotMissing: this tenant has no such snapshot.
        SnapshotInUse: somebody reads or writes it, or open questions need it.
    """
    row = require_snapshot(session, tenant, snapshot_id)
    if row.state in GONE_STATES:
        return
    removed = session.scalar(
        update(SnapshotRow)
        .where(SnapshotRow.snapshot_id == snapshot_id, _is_at_rest(now), ~is_needed(now))
        .values(state=SnapshotState.REMOVED, fence=SnapshotRow.fence + 1, owner=None, lease_until=None, pinned=False)
        .returning(SnapshotRow.snapshot_id)
        .execution_options(synchronize_session=False)
    )
    if removed is None:
        raise SnapshotInUse(snapshot_id)
    _note(session, Event.REMOVED, row, now)


def is_needed(now: datetime) -> ColumnElement[bool]:
    """Of a snapshot row in a query: somebody reads it, or questions of its document are open."""
    open_items = (
        exists()
        .where(
            ItemRow.tenant == SnapshotRow.tenant,
            ItemRow.document_id == SnapshotRow.document_id,
            ItemRow.state.in_(OPEN_STATES),
        )
        .correlate(SnapshotRow)
    )
    return or_(open_items, is_leased(now))


def _is_at_rest(now: datetime) -> ColumnElement[bool]:
    abandoned = or_(SnapshotRow.lease_until.is_(None), SnapshotRow.lease_until < now)
    return or_(SnapshotRow.state.in_(_RESTING_STATES), and_(SnapshotRow.state == SnapshotState.WRITING, abandoned))


def expire(session: Session, lifetimes: Lifetimes, *, now: datetime) -> int:
    """Marks what nobody needs and whose time is over, then what is over the budget. Returns how many."""
    drop_dead_leases(session, now=now)
    # A snapshot's time begins with its first use, or here.
    session.execute(
        update(SnapshotRow)
        .where(_is_at_rest(now), SnapshotRow.ready_at.is_not(None), SnapshotRow.expires_at.is_(None))
        .values(expires_at=now + timedelta(seconds=lifetimes.ttl_s))
        .execution_options(synchronize_session=False)
    )
    too_old = SnapshotRow.ready_at < now - timedelta(seconds=lifetimes.max_age_s)
    unused = (SnapshotRow.expires_at < now) & SnapshotRow.pinned.is_(False)
    count = _expire_where(session, too_old, reason="reached its maximum age", now=now)
    count += _expire_where(session, unused, reason="not used for its time to live", now=now)
    if lifetimes.budget_bytes is not None:
        for snapshot_id in _over_budget(session, lifetimes.budget_bytes, now=now):
            chosen = (SnapshotRow.snapshot_id == snapshot_id) & SnapshotRow.pinned.is_(False)
            count += _expire_where(session, chosen, reason="least recently used, over the budget", now=now)
    return count


def _expire_where(session: Session, condition: ColumnElement[bool], *, reason: str, now: datetime) -> int:
    expired = session.execute(
        update(SnapshotRow)
        .where(_is_at_rest(now), condition, ~is_needed(now))
        .values(state=SnapshotState.EXPIRED, pinned=False)
        .returning(SnapshotRow.snapshot_id, SnapshotRow.tenant, SnapshotRow.document_id)
        .execution_options(synchronize_session=False)
    ).all()
    for snapshot_id, tenant, document_id in expired:
        note_event(
            session,
            Event.EXPIRED,
            tenant=tenant,
            document_id=document_id,
            snapshot_id=snapshot_id,
            now=now,
            detail=reason,
        )
    return len(expired)


def _over_budget(session: Session, budget_bytes: int, *, now: datetime) -> list[int]:
    """Snapshots to give up, least recently used first, until the rest fits. A shared chunk counts once and is freed
    with the last snapshot that holds it."""
    live = SnapshotRow.state.not_in(GONE_STATES)
    referred = (
        select(SnapshotChunkRow.chunk_key)
        .join(SnapshotRow, SnapshotRow.snapshot_id == SnapshotChunkRow.snapshot_id)
        .where(live)
    )
    used = session.scalar(
        select(func.coalesce(func.sum(ChunkRow.size_bytes), 0)).where(ChunkRow.chunk_key.in_(referred))
    )
    excess = int(used or 0) - budget_bytes
    if excess <= 0:
        return []
    holders: dict[str, int] = {}
    chunks: dict[int, list[tuple[str, int]]] = {}
    for snapshot_id, key, size_bytes in session.execute(
        select(SnapshotChunkRow.snapshot_id, ChunkRow.chunk_key, ChunkRow.size_bytes)
        .join(ChunkRow, ChunkRow.chunk_key == SnapshotChunkRow.chunk_key)
        .join(SnapshotRow, SnapshotRow.snapshot_id == SnapshotChunkRow.snapshot_id)
        .where(live)
    ):
        holders[key] = holders.get(key, 0) + 1
        chunks.setdefault(snapshot_id, []).append((key, size_bytes))
    candidates = session.scalars(
        select(SnapshotRow.snapshot_id)
        .where(_is_at_rest(now), SnapshotRow.pinned.is_(False), ~is_needed(now))
        .order_by(SnapshotRow.last_used_at, SnapshotRow.snapshot_id)
    ).all()
    chosen = []
    for snapshot_id in candidates:
        if excess <= 0:
            break
        for key, size_bytes in chunks.get(snapshot_id, ()):
            holders[key] -= 1
            excess -= size_bytes if holders[key] == 0 else 0
        chosen.append(snapshot_id)
    return chosen


def _note(session: Session, event: Event, row: SnapshotRow, now: datetime) -> None:
    note_event(session, event, tenant=row.tenant, document_id=row.document_id, snapshot_id=row.snapshot_id, now=now)
