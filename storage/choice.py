"""What a worker does next, chosen from the rows: docs/queues.md has the rule.

Fast before batch; then the tenant that was given least for its weight, what it has under way counted; then what this
worker holds in memory, within bounds; then the oldest. What a tenant has too much of already is passed over.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import ScalarSelect, and_, func, select
from sqlalchemy.orm import Session

from storage.limits import Limits, TenantLimit
from storage.schema import ItemRow, ItemState, ShareRow, UnitRow
from storage.tiers import Stage, Tier
from storage.units import Unit, is_free, served_s, take_this_unit

LEAST_RUNNING_S = 1.0  # what has just begun counts as so much, so that several workers do not all begin with one tenant
WINDOW = 64  # units looked at for one that is in memory
AHEAD = timedelta(minutes=10)  # so much older ones are passed over for what is in memory, and no older ones


class Candidate(NamedTuple):
    """A tenant's work that may be taken up; the smallest is next."""

    is_batch: bool
    share_s: float
    is_other_stage: bool
    since: datetime
    tenant: str
    stage: Stage

    @property
    def tier(self) -> Tier:
        return Tier.BATCH if self.is_batch else Tier.FAST


def candidates(
    session: Session, *, stages: Sequence[Stage], tiers: Collection[Tier], limits: Limits, now: datetime
) -> list[Candidate]:
    """The most deserving first; where nothing else tells them apart, of the first of the stages. Two queries, which
    look at one row for each tenant, stage and tier and at what is under way, however much waits."""
    running = _running(session, now)
    kinds = [(stage, tier) for stage in stages for tier in Tier if tier in tiers]
    firsts = [_first_since(stage, tier, now).label(f"{stage}_{tier}") for stage, tier in kinds]
    found = []
    for tenant, given_s, given_at, *sinces in session.execute(
        select(ShareRow.tenant, ShareRow.served_s, ShareRow.served_at, *firsts)
    ):
        limit, begun = limits.of(tenant), running.get(tenant, [])
        if limit.running is not None and len(begun) >= limit.running:
            continue
        share_s = _share_s(served_s(given_s, given_at, now), begun, limit, now)
        found += [
            Candidate(tier == Tier.BATCH, share_s, stage != stages[0], since, tenant, stage)
            for (stage, tier), since in zip(kinds, sinces, strict=True)
            if since is not None
        ]
    return sorted(found)


def fills_a_batch(session: Session, size: int, *, tiers: Collection[Tier], now: datetime) -> bool:
    """Whether what waits for an answer, and can be given one, is so many questions, or holds fast ones."""
    free = (UnitRow.stage == Stage.ANSWER, UnitRow.tier.in_(tiers), is_free(now))
    if session.scalar(select(UnitRow.stage).where(UnitRow.tier == Tier.FAST, *free).limit(1)) is not None:
        return True
    questions = (
        select(ItemRow.item_id)
        .join(UnitRow, and_(UnitRow.tenant == ItemRow.tenant, UnitRow.document_id == ItemRow.document_id))
        .where(ItemRow.state == ItemState.QUEUED, *free)
        .limit(size)
    )
    return len(session.scalars(questions).all()) >= size


def share_of(session: Session, tenant: str, *, limits: Limits, now: datetime) -> float:
    """What the tenant was given and has under way, for its weight (seconds); as candidates have it."""
    share = session.get(ShareRow, tenant)
    given_s = 0.0 if share is None else served_s(share.served_s, share.served_at, now)
    return _share_s(given_s, _running(session, now).get(tenant, []), limits.of(tenant), now)


def _running(session: Session, now: datetime) -> dict[str, list[datetime]]:
    """When the units that are under way were begun, by tenant."""
    found: dict[str, list[datetime]] = {}
    for tenant, begun_at in session.execute(
        select(UnitRow.tenant, UnitRow.begun_at).where(UnitRow.owner.is_not(None), UnitRow.lease_until >= now)
    ):
        found.setdefault(tenant, []).append(begun_at or now)
    return found


def _share_s(given_s: float, begun: list[datetime], limit: TenantLimit, now: datetime) -> float:
    under_way_s = sum(max(LEAST_RUNNING_S, (now - at).total_seconds()) for at in begun)
    return (given_s + under_way_s) / limit.weight


def _first_since(stage: Stage, tier: Tier, now: datetime) -> ScalarSelect[datetime]:
    return (
        select(UnitRow.since)
        .where(UnitRow.stage == stage, UnitRow.tier == tier, UnitRow.tenant == ShareRow.tenant, is_free(now))
        .order_by(UnitRow.since)
        .limit(1)
        .correlate(ShareRow)
        .scalar_subquery()
    )


def take_one(
    session: Session,
    candidate: Candidate,
    *,
    limits: Limits,
    in_memory: Collection[int],
    owner: str,
    now: datetime,
    lease_s: float,
) -> Unit | None:
    """Takes the best of the candidate's units. None: others have taken them, or as many as the tenant may have at
    once. Of a tenant, one worker at a time does this, so a limit holds."""
    session.execute(select(ShareRow.tenant).where(ShareRow.tenant == candidate.tenant).with_for_update())
    most = limits.of(candidate.tenant).running
    if most is not None and _num_running(session, candidate.tenant, now) >= most:
        return None
    waiting = session.scalars(
        select(UnitRow)
        .where(
            UnitRow.stage == candidate.stage,
            UnitRow.tier == candidate.tier,
            UnitRow.tenant == candidate.tenant,
            is_free(now),
        )
        .order_by(UnitRow.since, UnitRow.document_id)
        .limit(WINDOW)
    ).all()

    def order(row: UnitRow) -> tuple[datetime, str]:
        ahead = AHEAD if row.snapshot_id in in_memory else timedelta()
        return row.since - ahead, row.document_id

    for row in sorted(waiting, key=order):
        taken = take_this_unit(
            session, candidate.stage, candidate.tenant, row.document_id, owner=owner, now=now, lease_s=lease_s
        )
        if taken is not None:
            return taken
    return None


def _num_running(session: Session, tenant: str, now: datetime) -> int:
    return session.scalars(
        select(func.count()).where(UnitRow.tenant == tenant, UnitRow.owner.is_not(None), UnitRow.lease_until >= now)
    ).one()
