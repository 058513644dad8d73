"""Units of work in rows: asked for, held under a lease, ended or put back."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, case, delete, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from storage.inserting import insert_new
from storage.schema import ItemRow, JobRow, ShareRow, SnapshotRow, SnapshotState, UnitRow
from storage.tiers import Stage, Tier
from storage.waiting import is_to_be_asked, waits_for

ROWS_PER_INSERT = 500
HALF_LIFE_S = 300.0  # what a tenant was given so long ago counts half


@dataclass(frozen=True)
class Unit:
    """What `owner` has taken up; `asks` is how often it had been asked for by then."""

    stage: Stage
    tenant: str
    document_id: str
    tier: Tier
    snapshot_id: int | None
    owner: str
    asks: int


class WaitingUnit(NamedTuple):
    """A unit that nobody holds, for a message."""

    stage: Stage
    tier: Tier
    tenant: str
    document_id: str
    snapshot_id: int | None


def add_units(
    session: Session,
    stage: Stage,
    tenant: str,
    document_ids: Iterable[str],
    *,
    tier: Tier,
    now: datetime,
    snapshot_id: int | None = None,
) -> None:
    """Asks for the work of these documents. What is there already is asked for once more; it becomes fast, and stays
    it, where one who asks is."""
    insert_new(session, ShareRow, [{"tenant": tenant, "served_s": 0.0, "served_at": now}])
    of_all = {"stage": stage, "tenant": tenant, "tier": tier, "snapshot_id": snapshot_id, "since": now, "asks": 1}
    rows = [{**of_all, "document_id": document_id} for document_id in sorted(set(document_ids))]
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    for start in range(0, len(rows), ROWS_PER_INSERT):
        new = insert(UnitRow).values(rows[start : start + ROWS_PER_INSERT])
        session.execute(
            new.on_conflict_do_update(
                index_elements=["stage", "tenant", "document_id"],
                set_={
                    "asks": UnitRow.asks + 1,
                    "snapshot_id": new.excluded.snapshot_id,
                    "tier": case((UnitRow.tier == Tier.FAST, UnitRow.tier), else_=new.excluded.tier),
                },
            )
        )


def is_free(now: datetime) -> ColumnElement[bool]:
    """Of a unit row in a query: nobody holds it, or whoever did is gone."""
    return or_(UnitRow.owner.is_(None), UnitRow.lease_until < now)


def take_this_unit(
    session: Session, stage: Stage, tenant: str, document_id: str, *, owner: str, now: datetime, lease_s: float
) -> Unit | None:
    """None: somebody else holds it, or it is gone."""
    taken = session.execute(
        update(UnitRow)
        .where(UnitRow.stage == stage, UnitRow.tenant == tenant, UnitRow.document_id == document_id, is_free(now))
        .values(owner=owner, lease_until=now + timedelta(seconds=lease_s), begun_at=now)
        .returning(UnitRow.tier, UnitRow.snapshot_id, UnitRow.asks)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if taken is None:
        return None
    return Unit(stage, tenant, document_id, Tier(taken.tier), taken.snapshot_id, owner, taken.asks)


def renew_units(session: Session, owner: str, *, now: datetime, lease_s: float) -> None:
    session.execute(update(UnitRow).where(UnitRow.owner == owner).values(lease_until=now + timedelta(seconds=lease_s)))


def end_unit(session: Session, unit: Unit, *, model: str, now: datetime) -> WaitingUnit | None:
    """Lets go of a unit that was worked on: it is gone, unless questions of its document still wait for an answer, or
    it was asked for anew. Then it waits again, and is returned."""
    tier = None
    if unit.stage == Stage.WHOLE or (unit.stage == Stage.ANSWER and _is_ready(session, unit.snapshot_id)):
        tier = asked_tier(session, tenant=unit.tenant, document_id=unit.document_id, model=model, now=now)
    if tier is None and drop_unit(session, unit, only_asked=unit.asks):
        return None
    return put_back_unit(session, unit, tier=tier)


def drop_unit(session: Session, unit: Unit, *, only_asked: int | None = None) -> bool:
    """Takes a unit that is held away, or does so only if it was asked for so often. False: it is still there."""
    asked = () if only_asked is None else (UnitRow.asks == only_asked,)
    gone = session.scalar(
        delete(UnitRow)
        .where(_is_held(unit), *asked)
        .returning(UnitRow.document_id)
        .execution_options(synchronize_session=False)
    )
    return gone is not None


def put_back_unit(session: Session, unit: Unit, *, tier: Tier | None = None) -> WaitingUnit | None:
    """Lets another take it up at once. None: it is not the owner's any more."""
    left = session.execute(
        update(UnitRow)
        .where(_is_held(unit))
        .values(owner=None, lease_until=None, begun_at=None, **({} if tier is None else {"tier": tier}))
        .returning(UnitRow.tier, UnitRow.snapshot_id)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if left is None:
        return None
    return WaitingUnit(unit.stage, Tier(left.tier), unit.tenant, unit.document_id, left.snapshot_id)


def redirect(session: Session, unit: WaitingUnit, stage: Stage, *, now: datetime) -> WaitingUnit:
    """The same document's work at another stage; as it was, where somebody is at it."""
    if unit.stage == stage:
        return unit
    this = (UnitRow.stage == unit.stage, UnitRow.tenant == unit.tenant, UnitRow.document_id == unit.document_id)
    session.execute(delete(UnitRow).where(*this, is_free(now)).execution_options(synchronize_session=False))
    if session.scalar(select(UnitRow.owner).where(*this)) is not None:
        return unit
    add_units(session, stage, unit.tenant, [unit.document_id], tier=unit.tier, now=now)
    return WaitingUnit(stage, unit.tier, unit.tenant, unit.document_id, None)


def _is_held(unit: Unit) -> ColumnElement[bool]:
    return and_(
        UnitRow.stage == unit.stage,
        UnitRow.tenant == unit.tenant,
        UnitRow.document_id == unit.document_id,
        UnitRow.owner == unit.owner,
    )


def _is_ready(session: Session, snapshot_id: int | None) -> bool:
    return session.scalar(select(SnapshotRow.state).filter_by(snapshot_id=snapshot_id)) == SnapshotState.READY


def asked_tier(session: Session, *, tenant: str, document_id: str, model: str, now: datetime) -> Tier | None:
    """The most urgent of the document's questions that wait to be asked; None: none does."""
    tiers = session.scalars(
        select(JobRow.tier)
        .join(ItemRow, ItemRow.job_id == JobRow.job_id)
        .where(waits_for(tenant, document_id, model, now), is_to_be_asked())
        .distinct()
    ).all()
    return Tier.FAST if Tier.FAST in tiers else Tier.BATCH if tiers else None


def find_waiting(session: Session, stage: Stage, tenant: str, document_id: str, *, now: datetime) -> WaitingUnit | None:
    """The unit, if nobody holds it."""
    return _first_waiting(session, now, stage, tenant, UnitRow.document_id == document_id)


def oldest_waiting(session: Session, tenant: str, *, now: datetime) -> list[WaitingUnit]:
    """Of each stage the tenant's unit that is next, where one waits."""
    found = []
    for stage in Stage:
        fast, batch = (_first_waiting(session, now, stage, tenant, UnitRow.tier == tier) for tier in Tier)
        found += [unit for unit in (fast or batch,) if unit]
    return found


def _first_waiting(
    session: Session, now: datetime, stage: Stage, tenant: str, condition: ColumnElement[bool]
) -> WaitingUnit | None:
    row = session.execute(
        select(UnitRow.tier, UnitRow.document_id, UnitRow.snapshot_id)
        .where(UnitRow.stage == stage, UnitRow.tenant == tenant, is_free(now), condition)
        .order_by(UnitRow.since, UnitRow.document_id)
        .limit(1)
    ).one_or_none()
    return row and WaitingUnit(stage, Tier(row.tier), tenant, row.document_id, row.snapshot_id)


def recover_units(session: Session, *, now: datetime) -> list[WaitingUnit]:
    """Puts back what dead workers held."""
    lost = session.execute(
        update(UnitRow)
        .where(UnitRow.owner.is_not(None), UnitRow.lease_until < now)
        .values(owner=None, lease_until=None, begun_at=None)
        .returning(UnitRow.stage, UnitRow.tier, UnitRow.tenant, UnitRow.document_id, UnitRow.snapshot_id)
        .execution_options(synchronize_session=False)
    ).all()
    return [WaitingUnit(Stage(row[0]), Tier(row[1]), *row[2:]) for row in lost]


def charge(session: Session, tenant: str, used_s: float, *, now: datetime) -> None:
    """Adds to what the tenant was given."""
    if used_s <= 0:
        return
    share = session.scalar(select(ShareRow).where(ShareRow.tenant == tenant).with_for_update())
    if share is not None:
        share.served_s = served_s(share.served_s, share.served_at, now) + used_s
        share.served_at = now
        session.flush()


def served_s(before_s: float, before: datetime, now: datetime) -> float:
    """What counts now of that many seconds then."""
    return float(before_s * 0.5 ** (max(0.0, (now - before).total_seconds()) / HALF_LIFE_S))
