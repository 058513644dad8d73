"""Schedules and their runs. Of each occurrence there is one row, and whoever holds its lease submits it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import String, cast, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from storage.errors import ScheduleMissing, ScheduleTaken
from storage.inserting import insert_new
from storage.schema import (
    AnswerRow,
    DocumentRow,
    ItemRow,
    ItemState,
    JobRow,
    QuestionRow,
    ScheduleRow,
    ScheduleRunRow,
)


def add_schedule(session: Session, values: dict[str, Any], now: datetime) -> None:
    """
    Raises:
        ScheduleTaken: the tenant has one of this name.
    """
    of_name = select(ScheduleRow.schedule_id).filter_by(tenant=values["tenant"], name=values["name"])
    if session.scalar(of_name) is not None:
        raise ScheduleTaken(values["name"])
    insert_new(session, ScheduleRow, [{**values, "created_at": now, "active_since": now}])


def require_schedule(session: Session, tenant: str, name: str) -> ScheduleRow:
    """
    Raises:
        ScheduleMissing: this tenant has no such schedule.
    """
    row = session.scalar(select(ScheduleRow).filter_by(tenant=tenant, name=name))
    if row is None:
        raise ScheduleMissing(name)
    return row


def list_schedules(session: Session, tenant: str) -> Sequence[ScheduleRow]:
    return session.scalars(select(ScheduleRow).where(ScheduleRow.tenant == tenant).order_by(ScheduleRow.name)).all()


def pause_schedule(session: Session, tenant: str, name: str, now: datetime) -> None:
    row = require_schedule(session, tenant, name)
    row.paused_at = row.paused_at or now
    session.flush()


def resume_schedule(session: Session, tenant: str, name: str, now: datetime) -> None:
    """What was due while it was paused is not made up for."""
    row = require_schedule(session, tenant, name)
    if row.paused_at is not None:
        row.paused_at, row.active_since = None, now
    session.flush()


def remove_schedule(session: Session, tenant: str, name: str) -> None:
    """Its jobs stay, its history goes."""
    row = require_schedule(session, tenant, name)
    session.execute(delete(ScheduleRunRow).where(ScheduleRunRow.schedule_id == row.schedule_id))
    session.execute(delete(ScheduleRow).where(ScheduleRow.schedule_id == row.schedule_id))


def schedule_runs(session: Session, schedule_id: int, limit: int) -> Sequence[ScheduleRunRow]:
    """The newest runs."""
    return session.scalars(
        select(ScheduleRunRow)
        .where(ScheduleRunRow.schedule_id == schedule_id)
        .order_by(ScheduleRunRow.due_at.desc(), ScheduleRunRow.run_id.desc())
        .limit(limit)
    ).all()


def claim_run(
    session: Session,
    schedule_id: int,
    *,
    kind: str,
    occurrence: str,
    due_at: datetime,
    owner: str,
    now: datetime,
    lease_s: float,
) -> int | None:
    """The run's id, if `owner` is to submit it; None: it is submitted, or somebody is at it."""
    key = {"schedule_id": schedule_id, "kind": kind, "occurrence": occurrence}
    counts = {"documents": 0, "new_items": 0, "carried_items": 0}
    insert_new(session, ScheduleRunRow, [{**key, **counts, "due_at": due_at}])
    return session.scalar(
        update(ScheduleRunRow)
        .where(
            *(getattr(ScheduleRunRow, name) == value for name, value in key.items()),
            ScheduleRunRow.finished_at.is_(None),
            or_(ScheduleRunRow.owner.is_(None), ScheduleRunRow.lease_until < now),
        )
        .values(owner=owner, lease_until=now + timedelta(seconds=lease_s))
        .returning(ScheduleRunRow.run_id)
        .execution_options(synchronize_session=False)
    )


def finish_run(session: Session, run_id: int, owner: str, now: datetime, **values: Any) -> bool:
    """Writes what became of a run. False: another has taken it over meanwhile."""
    done = session.scalar(
        update(ScheduleRunRow)
        .where(ScheduleRunRow.run_id == run_id, ScheduleRunRow.owner == owner, ScheduleRunRow.finished_at.is_(None))
        .values(finished_at=now, owner=None, lease_until=None, **values)
        .returning(ScheduleRunRow.run_id)
        .execution_options(synchronize_session=False)
    )
    return done is not None


def postpone_run(session: Session, run_id: int, owner: str, error: str, *, again_at: datetime) -> None:
    """Says what was in the way, and lets whoever comes after `again_at` try again."""
    session.execute(
        update(ScheduleRunRow)
        .where(ScheduleRunRow.run_id == run_id, ScheduleRunRow.owner == owner)
        .values(error=error, lease_until=again_at)
        .execution_options(synchronize_session=False)
    )


def give_back_run(session: Session, run_id: int, owner: str) -> None:
    """Lets the next one try at once."""
    session.execute(
        update(ScheduleRunRow)
        .where(ScheduleRunRow.run_id == run_id, ScheduleRunRow.owner == owner)
        .values(owner=None, lease_until=None)
        .execution_options(synchronize_session=False)
    )


@dataclass(frozen=True)
class NewWork:
    """Of a job that reuses answers: what no earlier job of the model has answered. `num_chars` are of the documents
    with such an item."""

    items: int
    answered_before: int
    documents: dict[str, int]


def new_work(session: Session, job_id: str) -> NewWork:
    """By texts and parameters of questions, those of reports too; workers compare exactly what changes an answer."""
    job = session.scalars(select(JobRow).where(JobRow.job_id == job_id)).one()
    item, question, other_job = aliased(ItemRow), aliased(QuestionRow), aliased(JobRow)
    answered = (
        exists()
        .where(
            item.tenant == ItemRow.tenant,
            item.document_id == ItemRow.document_id,
            item.state == ItemState.ANSWERED,
            item.job_id != job_id,
            question.job_id == item.job_id,
            question.position == item.question_position,
            question.text == QuestionRow.text,
            cast(question.params, String) == cast(QuestionRow.params, String),
            other_job.job_id == item.job_id,
            other_job.model == job.model,
            AnswerRow.item_id == item.item_id,
            AnswerRow.carried_from.is_(None),
        )
        .correlate(ItemRow, QuestionRow)
    )
    of_job = (
        select(ItemRow.document_id, func.count())
        .join(
            QuestionRow,
            (QuestionRow.job_id == ItemRow.job_id) & (QuestionRow.position == ItemRow.question_position),
        )
        .where(ItemRow.job_id == job_id, QuestionRow.error_code.is_(None))
        .group_by(ItemRow.document_id)
    )
    new = {str(document_id): int(count) for document_id, count in session.execute(of_job.where(~answered))}
    total = sum(count for _, count in session.execute(of_job))
    rows = session.execute(
        select(DocumentRow.document_id, DocumentRow.num_chars)
        .where(DocumentRow.tenant == job.tenant)
        .where(DocumentRow.document_id.in_(select(ItemRow.document_id).where(ItemRow.job_id == job_id)))
    ).all()
    chars = {document_id: num_chars for document_id, num_chars in rows if document_id in new}
    return NewWork(sum(new.values()), total - sum(new.values()), chars)
