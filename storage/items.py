"""Items: claimed under a lease, ended once, put back when their worker died.

Every change is a compare-and-set on state and owner, so a worker that was overtaken changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from storage.jobs import finish_if_done
from storage.schema import SPEC_PARAM, AnswerRow, ItemRow, ItemState, JobRow, QuestionRow


@dataclass(frozen=True)
class OpenItem:
    """What a worker needs to know of an item."""

    item_id: int
    job_id: str
    question: str
    params: dict[str, Any]


@dataclass(frozen=True)
class NewAnswer:
    """An answer with its usage and lineage; see AnswerRow.

    `logprobs` has an object for each token: `id`, `text`, `logprob`, and `top`, a list of the same for the likeliest.
    """

    text: str
    finish: str
    snapshot_id: int | None
    cached_tokens: int
    question_tokens: int
    output_tokens: int
    first_token_s: float
    total_s: float
    worker: str
    logprobs: list[dict[str, Any]] | None = None
    quote_prompt: str | None = None
    quote: str | None = None
    quote_start: int | None = None
    quote_stop: int | None = None


@dataclass(frozen=True)
class WaitingDocument:
    tenant: str
    document_id: str


def queued_items(session: Session, *, tenant: str, document_id: str, model: str) -> list[OpenItem]:
    """The queued items of a document, over all jobs that ask this model."""
    return _open_items(session, tenant, document_id, model, limit=None)


def claim_items(
    session: Session,
    *,
    tenant: str,
    document_id: str,
    model: str,
    owner: str,
    limit: int,
    now: datetime,
    lease_s: float,
) -> list[OpenItem]:
    """Takes up to `limit` queued items for `owner`, oldest first."""
    items = _open_items(session, tenant, document_id, model, limit=limit)
    if items:
        session.execute(
            update(ItemRow)
            .where(ItemRow.item_id.in_([item.item_id for item in items]), ItemRow.state == ItemState.QUEUED)
            .values(
                state=ItemState.RUNNING,
                owner=owner,
                lease_until=now + timedelta(seconds=lease_s),
                attempts=ItemRow.attempts + 1,
            )
        )
    return items


def _open_items(session: Session, tenant: str, document_id: str, model: str, limit: int | None) -> list[OpenItem]:
    query = (
        select(ItemRow.item_id, ItemRow.job_id, QuestionRow.text, QuestionRow.params)
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .join(
            QuestionRow,
            (QuestionRow.job_id == ItemRow.job_id) & (QuestionRow.position == ItemRow.question_position),
        )
        .where(
            ItemRow.tenant == tenant,
            ItemRow.document_id == document_id,
            ItemRow.state == ItemState.QUEUED,
            JobRow.model == model,
            JobRow.cancelled_at.is_(None),
        )
        .order_by(ItemRow.item_id)
    )
    if limit is not None:
        query = query.limit(limit).with_for_update(of=ItemRow, skip_locked=True)
    rows = session.execute(query).all()
    return [
        OpenItem(
            row.item_id, row.job_id, row.text, {name: row.params[name] for name in row.params if name != SPEC_PARAM}
        )
        for row in rows
    ]


def answer_item(session: Session, item_id: int, *, owner: str, answer: NewAnswer, now: datetime) -> bool:
    """Ends an item with its answer. False: the item is not the owner's any more, and nothing was changed."""
    job_id = _end(session, item_id, owner, now, state=ItemState.ANSWERED)
    if job_id is None:
        return False
    session.add(AnswerRow(item_id=item_id, created_at=now, **vars(answer)))
    session.flush()
    finish_if_done(session, job_id, now)
    return True


def fail_item(session: Session, item_id: int, *, owner: str | None, code: str, error: str, now: datetime) -> bool:
    """Ends an item with an error. `owner` None ends a queued item. False: nothing was changed."""
    job_id = _end(session, item_id, owner, now, state=ItemState.FAILED, error_code=code, error=error)
    if job_id is not None:
        finish_if_done(session, job_id, now)
    return job_id is not None


def cancel_item(session: Session, item_id: int, *, owner: str, now: datetime) -> bool:
    """Ends a running item of a cancelled job. False: nothing was changed."""
    job_id = _end(session, item_id, owner, now, state=ItemState.CANCELLED)
    if job_id is not None:
        finish_if_done(session, job_id, now)
    return job_id is not None


def _end(session: Session, item_id: int, owner: str | None, now: datetime, **values: Any) -> str | None:
    held = ItemRow.state == ItemState.QUEUED if owner is None else ItemRow.owner == owner
    return session.scalar(
        update(ItemRow)
        .where(ItemRow.item_id == item_id, held, ItemRow.state.in_((ItemState.QUEUED, ItemState.RUNNING)))
        .values(finished_at=now, owner=None, lease_until=None, **values)
        .returning(ItemRow.job_id)
    )


def release_items(session: Session, owner: str) -> None:
    """Gives everything the owner still holds back at once, as an orderly stop does; not counted as an attempt.

    What belongs to a cancelled job is ended by the next `recover_items`.
    """
    session.execute(
        update(ItemRow)
        .where(ItemRow.owner == owner, ItemRow.state == ItemState.RUNNING)
        .values(state=ItemState.QUEUED, owner=None, lease_until=None, kicked_at=None, attempts=ItemRow.attempts - 1)
    )


def renew_items(session: Session, owner: str, *, now: datetime, lease_s: float) -> None:
    session.execute(
        update(ItemRow)
        .where(ItemRow.owner == owner, ItemRow.state == ItemState.RUNNING)
        .values(lease_until=now + timedelta(seconds=lease_s))
    )


def cancelled_items(session: Session, owner: str) -> set[int]:
    """Items the owner runs although their job was cancelled."""
    return set(
        session.scalars(
            select(ItemRow.item_id)
            .join(JobRow, JobRow.job_id == ItemRow.job_id)
            .where(ItemRow.owner == owner, ItemRow.state == ItemState.RUNNING, JobRow.cancelled_at.is_not(None))
        )
    )


def recover_items(session: Session, *, now: datetime, max_attempts: int) -> int:
    """Puts back what a dead worker held; ends what has been tried too often or was cancelled. Returns how many."""
    lost = session.execute(
        select(ItemRow, JobRow.cancelled_at)
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .where(ItemRow.state == ItemState.RUNNING, ItemRow.lease_until < now)
        .order_by(ItemRow.item_id)
        .with_for_update(of=ItemRow, skip_locked=True)
    ).all()
    for item, cancelled_at in lost:
        item.owner = item.lease_until = item.kicked_at = None
        item.state = ItemState.QUEUED
        if cancelled_at is not None:
            item.state, item.finished_at = ItemState.CANCELLED, now
        elif item.attempts >= max_attempts:
            item.state, item.finished_at = ItemState.FAILED, now
            item.error_code = "worker_died"
            item.error = f"The worker died {item.attempts} times on this document; it is set aside."
    session.flush()
    stranded = _cancel_stranded(session, now)
    for job_id in dict.fromkeys([*(item.job_id for item, _ in lost), *stranded]):
        finish_if_done(session, job_id, now)
    return len(lost) + len(stranded)


def _cancel_stranded(session: Session, now: datetime) -> Sequence[str]:
    """Ends what was given back to the queue after, or just while, its job was cancelled; returns their jobs."""
    cancelled = select(JobRow.job_id).where(JobRow.cancelled_at.is_not(None), JobRow.finished_at.is_(None))
    return session.scalars(
        update(ItemRow)
        .where(ItemRow.state == ItemState.QUEUED, ItemRow.job_id.in_(cancelled))
        .values(state=ItemState.CANCELLED, finished_at=now)
        .returning(ItemRow.job_id)
        .execution_options(synchronize_session=False)
    ).all()


def fail_document_items(
    session: Session, *, tenant: str, document_id: str, model: str, code: str, error: str, now: datetime
) -> None:
    """Ends every queued item of a document that cannot be read."""
    for item in queued_items(session, tenant=tenant, document_id=document_id, model=model):
        fail_item(session, item.item_id, owner=None, code=code, error=error, now=now)


def take_unkicked(session: Session, *, now: datetime, kicked_before: datetime, limit: int) -> Sequence[WaitingDocument]:
    """Documents with queued items that nothing was sent for since `kicked_before`, those that wait longest first;
    marks them as kicked now."""
    unkicked = or_(ItemRow.kicked_at.is_(None), ItemRow.kicked_at < kicked_before)
    rows = session.execute(
        select(ItemRow.tenant, ItemRow.document_id)
        .where(ItemRow.state == ItemState.QUEUED, unkicked)
        .group_by(ItemRow.tenant, ItemRow.document_id)
        .order_by(func.min(ItemRow.item_id))
        .limit(limit)
    ).all()
    taken = []
    for tenant, document_id in rows:
        waiting = update(ItemRow).where(
            ItemRow.tenant == tenant, ItemRow.document_id == document_id, ItemRow.state == ItemState.QUEUED
        )
        # Every worker does this, so another may have taken the document since the rows were read.
        if session.scalars(waiting.where(unkicked).values(kicked_at=now).returning(ItemRow.item_id)).all():
            session.execute(waiting.values(kicked_at=now))
            taken.append(WaitingDocument(tenant, document_id))
    return taken
