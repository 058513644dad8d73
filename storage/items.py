"""Items: claimed under a lease, ended once, put back when their worker died.

Every change is a compare-and-set on state and owner, so a worker that was overtaken changes nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, cast

from sqlalchemy import ColumnElement, Table, bindparam, case, func, insert, not_, select, update
from sqlalchemy.orm import Session

from storage.endings import Move, end_overdue, end_without_answer, is_over, note_moves, release_held
from storage.schema import READING, AnswerRow, ItemRow, ItemState, JobRow, QuestionRow, ReadingRow
from storage.tiers import Tier
from storage.waiting import asked_params, is_to_be_asked, waits_for, workable_since
from storage.ways import Way, Why


@dataclass(frozen=True)
class OpenItem:
    """What a worker needs to know of an item. `attempts`: how often a worker has died on it; `since`: from when on its
    job could be worked on."""

    item_id: int
    job_id: str
    question: str
    params: dict[str, Any]
    attempts: int
    since: datetime


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
    device_s: float = 0.0
    load_s: float = 0.0
    load_bytes: int = 0
    loaded_from: str | None = None
    way: str = Way.SPLIT
    why: str = Why.MODE


def queued_items(session: Session, *, tenant: str, document_id: str, model: str) -> list[OpenItem]:
    """The queued items of a document, over all jobs that ask this model."""
    return _open_items(session, tenant, document_id, model, limit=None)


def is_suspect(session: Session, tenant: str, document_id: str) -> bool:
    """Whether a worker has died on queued questions of the document: who is answered beside it would die with it."""
    died = select(ItemRow.item_id).where(
        ItemRow.tenant == tenant,
        ItemRow.document_id == document_id,
        ItemRow.state == ItemState.QUEUED,
        ItemRow.attempts > 0,
    )
    return session.scalar(died.limit(1)) is not None


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
    only_fast: bool = False,
) -> list[OpenItem]:
    """Takes up to `limit` queued items for `owner`, those of fast jobs first, then the oldest; none of a job whose time
    to answer is over."""
    items = _open_items(session, tenant, document_id, model, limit=limit, now=now, only_fast=only_fast)
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


def _open_items(
    session: Session,
    tenant: str,
    document_id: str,
    model: str,
    limit: int | None,
    now: datetime | None = None,
    only_fast: bool = False,
) -> list[OpenItem]:
    query = (
        select(
            ItemRow.item_id,
            ItemRow.job_id,
            ItemRow.attempts,
            QuestionRow.text,
            QuestionRow.params,
            JobRow.created_at,
            JobRow.not_before,
        )
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
        .order_by(case((JobRow.tier == Tier.FAST, 0), else_=1), ItemRow.item_id)
    )
    if only_fast:
        query = query.where(JobRow.tier == Tier.FAST)
    if now is not None:
        query = query.where(not_(is_over(now)), is_to_be_asked())
    if limit is not None:
        query = query.limit(limit).with_for_update(of=ItemRow, skip_locked=True)
    rows = session.execute(query).all()
    return [
        OpenItem(
            row.item_id,
            row.job_id,
            row.text,
            asked_params(row.params),
            row.attempts,
            since=workable_since(row.created_at, row.not_before),
        )
        for row in rows
    ]


def answer_items(session: Session, answers: dict[int, NewAnswer], *, owner: str, now: datetime) -> set[int]:
    """Ends items with their answers and their shares of the reading, by their ids. Returns those that were the
    owner's; the others stay unchanged."""
    moment = {"ids": list(answers), "held_by": owner, "at": now}
    ended = session.execute(_ANSWERED, moment).all()
    rows = [
        {"item_id": row.item_id, "created_at": now, "of_job": row.job_id, "of_document": row.document_id}
        | vars(answers[row.item_id])
        for row in ended
    ]
    if rows:
        session.execute(_ANSWERS, rows)
    note_moves(session, [Move(row.job_id, ItemState.RUNNING, ItemState.ANSWERED) for row in ended], now)
    return {row["item_id"] for row in rows}


def answer_item(session: Session, item_id: int, *, owner: str, answer: NewAnswer, now: datetime) -> bool:
    """Ends an item with its answer. False: the item is not the owner's any more, and nothing was changed."""
    return bool(answer_items(session, {item_id: answer}, owner=owner, now=now))


# Built once: for every answer anew, that would take longer than running them.
_ITEMS = cast(Table, ItemRow.__table__)
_ANSWERED = (
    update(_ITEMS)
    .where(
        _ITEMS.c.item_id.in_(bindparam("ids", expanding=True)),
        _ITEMS.c.owner == bindparam("held_by"),
        _ITEMS.c.state == ItemState.RUNNING,
    )
    .values(state=ItemState.ANSWERED, finished_at=bindparam("at"), owner=None, lease_until=None)
    .returning(_ITEMS.c.item_id, _ITEMS.c.job_id, _ITEMS.c.document_id)
)
_READINGS = cast(Table, ReadingRow.__table__)
_SHARE = (
    select(_READINGS.c.prefill_s / _READINGS.c.num_items)
    .where(
        _READINGS.c.job_id == bindparam("of_job"),
        _READINGS.c.document_id == bindparam("of_document"),
        _READINGS.c.num_items > 0,
    )
    .scalar_subquery()
)
_ANSWERS = insert(cast(Table, AnswerRow.__table__)).values(
    {name: bindparam(name) for name in ("item_id", "created_at", *(field.name for field in fields(NewAnswer)))}
    | {"prefill_s": func.coalesce(_SHARE, 0.0)}
)


def fail_item(session: Session, item_id: int, *, owner: str | None, code: str, error: str, now: datetime) -> bool:
    """Ends an item with an error. `owner` None ends a queued item. False: nothing was changed."""
    return _end(session, item_id, owner, now, state=ItemState.FAILED, error_code=code, error=error) is not None


def cancel_item(session: Session, item_id: int, *, owner: str, now: datetime) -> bool:
    """Ends a running item of a job that was cancelled or whose time is over. False: nothing was changed."""
    cancelled_at = session.scalar(
        select(JobRow.cancelled_at).join(ItemRow, ItemRow.job_id == JobRow.job_id).where(ItemRow.item_id == item_id)
    )
    return _end(session, item_id, owner, now, state=end_without_answer(cancelled_at)) is not None


def _end(
    session: Session, item_id: int, owner: str | None, now: datetime, *, state: ItemState, **values: Any
) -> str | None:
    held = ItemRow.state == ItemState.QUEUED if owner is None else ItemRow.owner == owner
    job_id = session.scalar(
        update(ItemRow)
        .where(ItemRow.item_id == item_id, held, ItemRow.state.in_((ItemState.QUEUED, ItemState.RUNNING)))
        .values(state=state, finished_at=now, owner=None, lease_until=None, **values)
        .returning(ItemRow.job_id)
        .execution_options(synchronize_session=False)
    )
    if job_id is not None:
        note_moves(session, [Move(job_id, ItemState.QUEUED, state)], now)
    return job_id


def release_items(session: Session, owner: str, item_ids: Collection[int] | None = None) -> None:
    """Gives everything the owner still holds, or these of it, back at once, as an orderly stop does; not counted as an
    attempt.

    What belongs to a job that is over is ended by the next `recover_items`.
    """
    meant = () if item_ids is None else (ItemRow.item_id.in_(item_ids),)
    session.execute(
        update(ItemRow)
        .where(ItemRow.owner == owner, ItemRow.state == ItemState.RUNNING, *meant)
        .values(state=ItemState.QUEUED, owner=None, lease_until=None, kicked_at=None, attempts=ItemRow.attempts - 1)
    )


def renew_items(session: Session, owner: str, *, now: datetime, lease_s: float) -> None:
    session.execute(
        update(ItemRow)
        .where(ItemRow.owner == owner, ItemRow.state == ItemState.RUNNING)
        .values(lease_until=now + timedelta(seconds=lease_s))
    )


def cancelled_items(session: Session, owner: str, now: datetime) -> set[int]:
    """Items the owner runs although their job was cancelled or its time is over."""
    return set(
        session.scalars(
            select(ItemRow.item_id)
            .join(JobRow, JobRow.job_id == ItemRow.job_id)
            .where(ItemRow.owner == owner, ItemRow.state == ItemState.RUNNING, is_over(now))
        )
    )


def recover_items(session: Session, *, now: datetime, max_attempts: int) -> int:
    """Queues what is due and what a dead worker held; ends what has been tried too often, was cancelled or is late.
    Returns how many."""
    lost = session.execute(
        select(ItemRow, JobRow.cancelled_at, is_over(now))
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .where(ItemRow.state == ItemState.RUNNING, ItemRow.lease_until < now)
        .order_by(ItemRow.item_id)
        .with_for_update(of=ItemRow, skip_locked=True)
    ).all()
    for item, cancelled_at, over in lost:
        how, item.error = item.error, None  # as far as anybody knows: see storage.deaths
        item.owner = item.lease_until = item.kicked_at = None
        item.state = ItemState.QUEUED
        if over:
            item.state, item.finished_at = end_without_answer(cancelled_at), now
        elif item.attempts >= max_attempts:
            item.state, item.finished_at = ItemState.FAILED, now
            item.error_code = "worker_died"
            last = f", the last time by {how}" if how else ""
            item.error = f"The worker died {item.attempts} times on this document{last}; it is set aside."
    session.flush()
    note_moves(session, [Move(item.job_id, ItemState.RUNNING, item.state) for item, _, _ in lost], now)
    return len(lost) + end_overdue(session, now) + release_held(session, now)


def is_wanted(session: Session, *, tenant: str, document_id: str, model: str, now: datetime) -> bool:
    """Whether a job of this model still waits for the document's snapshot."""
    found = session.scalar(
        select(ItemRow.item_id)
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .where(waits_for(tenant, document_id, model, now))
        .limit(1)
    )
    return found is not None


def end_readings(session: Session, *, tenant: str, document_id: str, model: str, now: datetime) -> None:
    """Ends the items that wait for no answer but for the document's snapshot, which is ready."""
    _end_queued(
        session, tenant, document_id, model, now, ItemRow.question_position == READING, state=ItemState.ANSWERED
    )


def fail_document_items(
    session: Session, *, tenant: str, document_id: str, model: str, code: str, error: str, now: datetime
) -> None:
    """Ends every queued item of a document that cannot be read."""
    _end_queued(session, tenant, document_id, model, now, state=ItemState.FAILED, error_code=code, error=error)


def _end_queued(
    session: Session,
    tenant: str,
    document_id: str,
    model: str,
    now: datetime,
    *conditions: ColumnElement[bool],
    state: ItemState,
    **values: Any,
) -> None:
    of_model = select(JobRow.job_id).where(
        JobRow.model == model, JobRow.finished_at.is_(None), JobRow.cancelled_at.is_(None)
    )
    job_ids = session.scalars(
        update(ItemRow)
        .where(
            ItemRow.tenant == tenant,
            ItemRow.document_id == document_id,
            ItemRow.state == ItemState.QUEUED,
            ItemRow.job_id.in_(of_model),
            *conditions,
        )
        .values(state=state, finished_at=now, **values)
        .returning(ItemRow.job_id)
        .execution_options(synchronize_session=False)
    ).all()
    note_moves(session, [Move(job_id, ItemState.QUEUED, state) for job_id in job_ids], now)
