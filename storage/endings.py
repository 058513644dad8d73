"""How items end, and how that ends their jobs: rows of items and counts of jobs change together."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, cast

from sqlalchemy import ColumnElement, Integer, Table, Update, and_, bindparam, case, event, or_, select, update
from sqlalchemy.orm import Session

from storage.errors import RetryRefused
from storage.lineage import Event, note_event
from storage.progress import require_job
from storage.schema import (
    COUNTS,
    OPEN_STATES,
    WAITING_STATES,
    ItemRow,
    ItemState,
    JobRow,
    QuestionRow,
    UtcDateTime,
)

_CHANGES = "changes of job counts"  # in a session's `info`


class Move(NamedTuple):
    """An item of a job from one state to another; None: it is not there."""

    job_id: str
    before: ItemState | None
    after: ItemState | None


def note_moves(session: Session, moves: Iterable[Move], now: datetime) -> None:
    """Brings the jobs' counts up to date, and ends those without an open item, when the transaction commits.

    At its end, since a transaction may change items several times over: it then locks items before jobs, and jobs in
    one order, so that no two can deadlock. One statement a job, so two workers that end the last two items count one
    after the other.
    """
    noted: dict[str, _Change] = session.info.setdefault(_CHANGES, {})
    for job_id, before, after in moves:
        change = noted.setdefault(job_id, _Change(now))
        change.now = now
        if before is not None:
            change.counts[_column(before)] -= 1
        if after is not None:
            change.counts[_column(after)] += 1


@dataclass
class _Change:
    """Of one job's counts, in one transaction."""

    now: datetime
    counts: Counter[str] = field(default_factory=Counter)


@event.listens_for(Session, "before_commit")
def _count(session: Session) -> None:
    noted: dict[str, _Change] = session.info.pop(_CHANGES, {})
    if noted:
        session.flush()  # items that were changed as objects, too, are locked before jobs
    for job_id, change in sorted(noted.items()):
        counts = {name: count for name, count in sorted(change.counts.items()) if count}
        if counts:
            session.execute(_counting(tuple(counts)), {"of_job": job_id, "at": change.now, **counts})


@cache
def _counting(names: tuple[str, ...]) -> Update:
    """Built once for each set of counts: building it anew would take longer than running it."""
    jobs = cast(Table, JobRow.__table__)
    values: dict[str, Any] = {name: jobs.c[name] + bindparam(name, type_=Integer) for name in names}
    if "num_open" in values:
        finished = bindparam("at", type_=UtcDateTime())
        values["finished_at"] = case((values["num_open"] == 0, finished), else_=None)
    return update(jobs).where(jobs.c.job_id == bindparam("of_job")).values(values)


def _column(state: ItemState) -> str:
    return "num_open" if state in OPEN_STATES else COUNTS[state]


def is_over(now: datetime) -> ColumnElement[bool]:
    """Of a job row in a query: its open items are to end without an answer."""
    return or_(JobRow.cancelled_at.is_not(None), and_(JobRow.answer_by.is_not(None), JobRow.answer_by <= now))


def end_without_answer(cancelled_at: datetime | None) -> ItemState:
    """How an open item of a job that is over ends."""
    return ItemState.EXPIRED if cancelled_at is None else ItemState.CANCELLED


def cancel_job(session: Session, tenant: str, job_id: str, now: datetime) -> int:
    """Ends what waits at once and flags what is running; finished answers stay. Returns the items ended now."""
    require_job(session, tenant, job_id)
    moves = _end_waiting(session, ItemRow.job_id == job_id, ItemState.CANCELLED, now)
    session.execute(
        update(JobRow)
        .where(JobRow.job_id == job_id, JobRow.cancelled_at.is_(None), JobRow.finished_at.is_(None))
        .values(cancelled_at=now)
        .execution_options(synchronize_session=False)
    )
    note_moves(session, moves, now)
    return len(moves)


def end_overdue(session: Session, now: datetime) -> int:
    """Ends what waits of jobs whose time to answer is over, and what came back to the queue after, or just while, its
    job was cancelled. Returns how many items."""
    unfinished = JobRow.finished_at.is_(None)
    cancelled = select(JobRow.job_id).where(unfinished, JobRow.cancelled_at.is_not(None))
    late = select(JobRow.job_id).where(unfinished, JobRow.cancelled_at.is_(None), JobRow.answer_by <= now)
    moves = _end_waiting(session, ItemRow.job_id.in_(cancelled), ItemState.CANCELLED, now)
    moves += _end_waiting(session, ItemRow.job_id.in_(late), ItemState.EXPIRED, now)
    note_moves(session, moves, now)
    return len(moves)


def _end_waiting(session: Session, condition: ColumnElement[bool], state: ItemState, now: datetime) -> list[Move]:
    job_ids = session.scalars(
        update(ItemRow)
        .where(condition, ItemRow.state.in_(WAITING_STATES))
        .values(state=state, finished_at=now)
        .returning(ItemRow.job_id)
        .execution_options(synchronize_session=False)
    ).all()
    return [Move(job_id, ItemState.QUEUED, state) for job_id in job_ids]


def release_held(session: Session, now: datetime) -> int:
    """Queues the items of jobs whose time has come; returns how many."""
    due = select(JobRow.job_id).where(JobRow.finished_at.is_(None), JobRow.not_before <= now)
    queued = session.scalars(
        update(ItemRow)
        .where(ItemRow.job_id.in_(due), ItemRow.state == ItemState.HELD)
        .values(state=ItemState.QUEUED)
        .returning(ItemRow.item_id)
        .execution_options(synchronize_session=False)
    ).all()
    return len(queued)


def retry_job(
    session: Session, tenant: str, job_id: str, *, expired: bool, answer_by: datetime | None, now: datetime
) -> int:
    """Queues the job's failed items again, with `expired` the expired ones too, as if never tried; how each had ended
    goes to the lineage of its document. A time to answer that has passed is lifted, or replaced by `answer_by`.
    Questions that cannot be asked stay as they are. Returns how many items.

    Raises:
        JobMissing: this tenant has no such job.
        RetryRefused: it was cancelled.
    """
    job = require_job(session, tenant, job_id)
    if job.cancelled_at is not None:
        raise RetryRefused(job_id)
    states = (ItemState.FAILED, ItemState.EXPIRED) if expired else (ItemState.FAILED,)
    found = session.scalars(
        select(ItemRow)
        .outerjoin(QuestionRow, and_(QuestionRow.job_id == job_id, QuestionRow.position == ItemRow.question_position))
        .where(ItemRow.job_id == job_id, ItemRow.state.in_(states), QuestionRow.error_code.is_(None))
        .order_by(ItemRow.item_id)
        .with_for_update(of=ItemRow)
    ).all()
    moves = [Move(job_id, item.state, ItemState.QUEUED) for item in found]
    history: dict[tuple[str, str, int], int] = defaultdict(int)
    for item in found:
        history[item.document_id, item.error_code or item.state, item.attempts] += 1
        item.state = ItemState.QUEUED
        item.attempts = 0
        item.owner = item.lease_until = item.kicked_at = item.finished_at = item.error_code = item.error = None
    session.flush()
    for (document_id, ending, attempts), count in history.items():
        note_event(
            session,
            Event.RETRIED,
            tenant=tenant,
            document_id=document_id,
            snapshot_id=None,
            now=now,
            detail=f"job {job_id}: {count} items that had ended as {ending}, tried {attempts} times",
        )
    if found and (answer_by is not None or (job.answer_by is not None and job.answer_by <= now)):
        job.answer_by = answer_by
    session.flush()
    note_moves(session, moves, now)
    return len(found)
