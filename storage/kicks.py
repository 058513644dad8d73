"""Which documents to send a message for: those with queued items that none was sent for lately."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from storage.schema import ItemRow, ItemState, JobRow
from storage.tiers import Stage, Tier
from storage.units import WaitingUnit, add_units
from storage.waiting import queued_window

FIRST_JOBS = 50  # fast ones whose documents are looked for before all others


def take_unkicked(
    session: Session, *, now: datetime, kicked_before: datetime, limit: int, first: str | None = None
) -> list[WaitingUnit]:
    """Documents with queued items that nothing was sent for since `kicked_before`, as units to be read: those of the
    job `first`, then of fast jobs, then those that wait longest. Marks them as kicked now, and asks for their units."""
    unkicked = or_(ItemRow.kicked_at.is_(None), ItemRow.kicked_at < kicked_before)
    fast = _open_fast_jobs(session)
    documents = _unkicked_documents(session, kicked_before, limit, [[first] if first else [], fast])
    # Every worker does this, so another may have taken a document since they were read.
    taken = _mark_kicked(session, documents, unkicked, now)
    _mark_kicked(session, taken, or_(ItemRow.kicked_at.is_(None), ItemRow.kicked_at != now), now)
    urgent = _documents_of(session, fast, taken)
    for tenant in sorted({tenant for tenant, _ in taken}):
        for tier in Tier:
            of_tier = [name for of, name in taken if of == tenant and ((of, name) in urgent) == (tier == Tier.FAST)]
            add_units(session, Stage.READ, tenant, of_tier, tier=tier, now=now)
    return [
        WaitingUnit(Stage.READ, Tier.FAST if document in urgent else Tier.BATCH, *document, snapshot_id=None)
        for document in documents
        if document in taken
    ]


def _open_fast_jobs(session: Session) -> list[str]:
    query = select(JobRow.job_id).where(JobRow.finished_at.is_(None), JobRow.tier == Tier.FAST)
    return list(session.scalars(query.order_by(JobRow.created_at).limit(FIRST_JOBS)))


def _documents_of(session: Session, job_ids: list[str], documents: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of the documents that have queued items of these jobs."""
    if not job_ids or not documents:
        return set()
    found = session.execute(
        select(ItemRow.tenant, ItemRow.document_id)
        .where(
            tuple_(ItemRow.tenant, ItemRow.document_id).in_(list(documents)),
            ItemRow.state == ItemState.QUEUED,
            ItemRow.job_id.in_(job_ids),
        )
        .distinct()
    )
    return {(tenant, document_id) for tenant, document_id in found}


def _mark_kicked(
    session: Session, documents: Collection[tuple[str, str]], condition: ColumnElement[bool], now: datetime
) -> set[tuple[str, str]]:
    """Marks those of the documents' queued items that nobody else is changing; returns their documents."""
    free = (
        select(ItemRow.item_id)
        .where(
            tuple_(ItemRow.tenant, ItemRow.document_id).in_(list(documents)),
            ItemRow.state == ItemState.QUEUED,
            condition,
        )
        .with_for_update(skip_locked=True)
    )
    marked = session.execute(
        update(ItemRow)
        .where(ItemRow.item_id.in_(free))
        .values(kicked_at=now)
        .returning(ItemRow.tenant, ItemRow.document_id)
        .execution_options(synchronize_session=False)
    )
    return {(tenant, document_id) for tenant, document_id in marked}


def _unkicked_documents(
    session: Session, kicked_before: datetime, limit: int, first: Sequence[list[str]]
) -> list[tuple[str, str]]:
    """Those of jobs in `first` come before all others, in this order."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    orders: list[tuple[ColumnElement[bool], tuple[Any, ...]]] = [
        (ItemRow.kicked_at.is_(None), (ItemRow.item_id,)),
        (ItemRow.kicked_at < kicked_before, (ItemRow.kicked_at, ItemRow.item_id)),
    ]
    for rank, job_ids in enumerate([*first, None]):
        of_jobs = () if job_ids is None else (ItemRow.job_id.in_(job_ids),)
        for condition, order in orders if job_ids is None or job_ids else ():
            window = queued_window(condition, *of_jobs, order=order, documents=limit)
            first_item = func.min(window.c.item_id)
            rows = session.execute(
                select(window.c.tenant, window.c.document_id, first_item)
                .group_by(window.c.tenant, window.c.document_id)
                .order_by(first_item)
                .limit(limit)
            ).all()
            for tenant, document_id, item_id in rows:
                found.setdefault((tenant, document_id), (rank, item_id))
    return sorted(found, key=found.__getitem__)[:limit]
