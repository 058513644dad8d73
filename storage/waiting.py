"""What waits: for a document, for an answer; and what of a question changes its answer."""

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Subquery, and_, case, exists, literal_column, not_, or_, select
from sqlalchemy.orm import Session

from storage.endings import is_over
from storage.schema import READING, SPEC_PARAM, ItemRow, ItemState, JobRow, ReadingRow
from storage.tiers import Tier

ITEMS_PER_DOCUMENT = 50  # as a rule; with more, the others of these documents are found by the next look


def waits_for(tenant: str, document_id: str, model: str, now: datetime) -> ColumnElement[bool]:
    """Of an item and its job in a query: it waits for this document, and for this model, and its time is not over."""
    return and_(
        ItemRow.tenant == tenant,
        ItemRow.document_id == document_id,
        ItemRow.state == ItemState.QUEUED,
        JobRow.model == model,
        not_(is_over(now)),
    )


def workable_since(created_at: datetime, not_before: datetime | None) -> datetime:
    """From when on a job could be worked on."""
    return max(created_at, not_before or created_at)


class WaitingJob(NamedTuple):
    """`since`: from when on it could be worked on."""

    job_id: str
    since: datetime


def waiting_jobs(
    session: Session, *, tenant: str, document_id: str, model: str, now: datetime, most: int
) -> list[WaitingJob]:
    """The jobs that wait for this document and this model, fast ones first, then the oldest."""
    queued = select(ItemRow.job_id).where(
        ItemRow.tenant == tenant, ItemRow.document_id == document_id, ItemRow.state == ItemState.QUEUED
    )
    rows = session.execute(
        select(JobRow.job_id, JobRow.created_at, JobRow.not_before)
        .where(JobRow.job_id.in_(queued), JobRow.model == model, not_(is_over(now)))
        .order_by(case((JobRow.tier == Tier.FAST, 0), else_=1), JobRow.created_at, JobRow.job_id)
        .limit(most)
    )
    return [WaitingJob(row.job_id, workable_since(row.created_at, row.not_before)) for row in rows]


def queued_window(*conditions: ColumnElement[bool], order: tuple[Any, ...], documents: int) -> Subquery:
    """As many queued items, in the order of an index, as hold about so many documents: a long queue makes no look
    longer."""
    return (
        select(ItemRow.tenant, ItemRow.document_id, ItemRow.item_id, ItemRow.kicked_at)
        .where(ItemRow.state == literal_column("'queued'"), *conditions)  # as the partial index says it
        .order_by(*order)
        .limit(documents * ITEMS_PER_DOCUMENT)
        .subquery()
    )


def is_to_be_asked() -> ColumnElement[bool]:
    """Of an item and its job in a query: it waits for an answer that has to be computed. Not so what waits for the
    snapshot alone, and what may have been answered before, until its document's prefill has looked."""
    looked = (
        exists()
        .where(ReadingRow.job_id == ItemRow.job_id, ReadingRow.document_id == ItemRow.document_id)
        .correlate(ItemRow)
    )
    return and_(ItemRow.question_position != READING, or_(not_(JobRow.reuse_answers), looked))


def asked_params(params: dict[str, Any]) -> dict[str, Any]:
    """Of a question's params those that change its answer."""
    return {name: value for name, value in params.items() if name != SPEC_PARAM}
