"""Jobs: written once, in one transaction; looked at, cancelled and read out from rows at any time."""

import secrets
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import exists, func, insert, select, update
from sqlalchemy.orm import Session

from storage.documents import add_document
from storage.errors import JobMissing
from storage.schema import (
    OPEN_STATES,
    SPEC_PARAM,
    AnswerRow,
    ItemRow,
    ItemState,
    JobRow,
    QuestionRow,
    ReadingRow,
    SnapshotRow,
    SnapshotState,
    SourceRow,
)

ITEMS_PER_INSERT = 2000
ID_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: nothing that reads like something else


@dataclass(frozen=True)
class NewSource:
    """One input file: a document's text id with its page map, or the error that stands in its place."""

    name: str
    document_id: str | None = None
    num_chars: int = 0
    page_starts: tuple[int, ...] = ()
    pages_without_text: tuple[int, ...] = ()
    error_code: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class NewQuestion:
    """`params` are for the worker, `spec` is for reports; both are JSON."""

    question_id: str
    title: str
    text: str
    params: dict[str, Any] = field(default_factory=dict)
    error_code: str | None = None
    error: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobStatus:
    """A job in numbers. `items` counts by state; `rows` is sources × questions, what the report will hold."""

    job_id: str
    title: str
    model: str
    created_at: datetime
    cancelled_at: datetime | None
    finished_at: datetime | None
    sources: int
    sources_failed: int
    questions: int
    items: dict[ItemState, int]

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def done(self) -> int:
        return self.total - self.open

    @property
    def open(self) -> int:
        return sum(self.items.get(state, 0) for state in OPEN_STATES)

    @property
    def rows(self) -> int:
        return self.sources * self.questions


@dataclass(frozen=True)
class Reading:
    """How a job came by one document's snapshot, and how far its prefill is."""

    document_id: str
    way: str
    num_tokens: int
    done_tokens: int
    computed_tokens: int
    reused_tokens: int
    prefill_s: float
    size_bytes: int
    ready: bool


def create_job(
    session: Session,
    *,
    tenant: str,
    model: str,
    title: str,
    sources: list[NewSource],
    questions: list[NewQuestion],
    now: datetime,
) -> str:
    """Writes job, sources, questions and items. The caller commits; nothing of the job exists before that."""
    job_id = "".join(secrets.choice(ID_LETTERS) for _ in range(12))
    session.add(JobRow(job_id=job_id, tenant=tenant, model=model, title=title, created_at=now))
    session.flush()
    documents = {source.document_id: source for source in sources if source.document_id is not None}
    # Sorted, so that two submissions of the same documents never wait for each other's rows.
    for document_id, source in sorted(documents.items()):
        add_document(session, tenant=tenant, document_id=document_id, num_chars=source.num_chars, now=now)
    for position, source in enumerate(sources):
        session.add(
            SourceRow(
                job_id=job_id,
                position=position,
                tenant=tenant,
                name=source.name,
                document_id=source.document_id,
                page_starts=list(source.page_starts),
                pages_without_text=list(source.pages_without_text),
                error_code=source.error_code,
                error=source.error,
            )
        )
    for position, question in enumerate(questions):
        session.add(
            QuestionRow(
                job_id=job_id,
                position=position,
                question_id=question.question_id,
                title=question.title,
                text=question.text,
                params=question.params | ({SPEC_PARAM: question.spec} if question.spec else {}),
                error_code=question.error_code,
                error=question.error,
            )
        )
    session.flush()
    items = [
        {
            "job_id": job_id,
            "tenant": tenant,
            "document_id": document_id,
            "question_position": position,
            "state": ItemState.FAILED if question.error else ItemState.QUEUED,
            "attempts": 0,
            "finished_at": now if question.error else None,
            "error_code": question.error_code,
            "error": question.error,
        }
        for document_id in documents
        for position, question in enumerate(questions)
    ]
    for start in range(0, len(items), ITEMS_PER_INSERT):
        # Returning makes SQLAlchemy send many rows in one statement; pg8000 would send each on its own.
        session.execute(insert(ItemRow).returning(ItemRow.item_id), items[start : start + ITEMS_PER_INSERT])
    finish_if_done(session, job_id, now)
    return job_id


def finish_if_done(session: Session, job_id: str, now: datetime) -> None:
    """Marks the job finished when no item of it is open. Called after the items were changed."""
    # Two workers that end the last two items at the same time do not see each other's; so one waits for the other.
    session.execute(select(JobRow.job_id).where(JobRow.job_id == job_id).with_for_update(key_share=True))
    is_open = exists().where(ItemRow.job_id == job_id, ItemRow.state.in_(OPEN_STATES))
    session.execute(
        update(JobRow).where(JobRow.job_id == job_id, JobRow.finished_at.is_(None), ~is_open).values(finished_at=now)
    )


def cancel_job(session: Session, tenant: str, job_id: str, now: datetime) -> int:
    """Ends what is queued at once and flags what is running; finished answers stay. Returns the items ended now."""
    require_job(session, tenant, job_id)
    # The items first, as everywhere: locks taken in one order cannot deadlock.
    ended = session.execute(
        update(ItemRow)
        .where(ItemRow.job_id == job_id, ItemRow.state == ItemState.QUEUED)
        .values(state=ItemState.CANCELLED, finished_at=now)
    )
    session.execute(
        update(JobRow)
        .where(JobRow.job_id == job_id, JobRow.cancelled_at.is_(None), JobRow.finished_at.is_(None))
        .values(cancelled_at=now)
    )
    finish_if_done(session, job_id, now)
    return int(ended.rowcount)  # type: ignore[attr-defined] # SQLAlchemy types execute() too widely


def job_status(session: Session, tenant: str, job_id: str) -> JobStatus:
    """
    Raises:
        JobMissing: this tenant has no such job.
    """
    job = require_job(session, tenant, job_id)
    counts = session.execute(
        select(ItemRow.state, func.count()).where(ItemRow.job_id == job_id).group_by(ItemRow.state)
    ).all()
    source_count, failed_count = session.execute(
        select(func.count(), func.count(SourceRow.error_code)).where(SourceRow.job_id == job_id)
    ).one()
    questions = session.scalar(select(func.count()).select_from(QuestionRow).where(QuestionRow.job_id == job_id))
    return JobStatus(
        job_id=job_id,
        title=job.title,
        model=job.model,
        created_at=job.created_at,
        cancelled_at=job.cancelled_at,
        finished_at=job.finished_at,
        sources=source_count,
        sources_failed=failed_count,
        questions=questions or 0,
        items={ItemState(state): count for state, count in counts},
    )


def job_readings(session: Session, tenant: str, job_id: str) -> list[Reading]:
    """One entry per document of the job that a worker has looked at."""
    rows = session.execute(
        select(ReadingRow, SnapshotRow)
        .join(SnapshotRow, SnapshotRow.snapshot_id == ReadingRow.snapshot_id)
        .where(ReadingRow.job_id == job_id, SnapshotRow.tenant == tenant)
        .order_by(ReadingRow.created_at)
    ).all()
    return [
        Reading(
            document_id=reading.document_id,
            way=reading.way,
            num_tokens=snapshot.num_tokens,
            done_tokens=snapshot.done_tokens,
            computed_tokens=reading.computed_tokens,
            reused_tokens=reading.reused_tokens,
            prefill_s=reading.prefill_s,
            size_bytes=snapshot.size_bytes,
            ready=snapshot.state == SnapshotState.READY,
        )
        for reading, snapshot in rows
    ]


def require_job(session: Session, tenant: str, job_id: str) -> JobRow:
    job = session.scalar(select(JobRow).where(JobRow.job_id == job_id, JobRow.tenant == tenant))
    if job is None:
        raise JobMissing(job_id)
    return job


@dataclass(frozen=True)
class Timing:
    """Sums over a job's answers. `decode_s` is the time during which at least one was being decoded."""

    cached_tokens: int
    output_tokens: int
    decode_s: float


def job_timing(session: Session, job_id: str) -> Timing:
    """Counts every answer once, also where several sources share it."""
    rows = session.execute(
        select(AnswerRow.created_at, AnswerRow.total_s, AnswerRow.cached_tokens, AnswerRow.output_tokens)
        .join(ItemRow, ItemRow.item_id == AnswerRow.item_id)
        .where(ItemRow.job_id == job_id)
    ).all()
    spans = sorted((row.created_at.timestamp() - row.total_s, row.created_at.timestamp()) for row in rows)
    decode_s, covered = 0.0, 0.0
    for start, stop in spans:
        decode_s += max(0.0, stop - max(start, covered))
        covered = max(covered, stop)
    return Timing(sum(row.cached_tokens for row in rows), sum(row.output_tokens for row in rows), decode_s)


@dataclass(frozen=True)
class Progress:
    """How far a job is. Tokens count the documents whose prefill has begun and is not yet noted as done."""

    items: int
    items_done: int
    documents: int
    documents_read: int
    reading_tokens: int
    reading_done: int
    found: int


def job_progress(session: Session, tenant: str, job_id: str) -> Progress:
    """For a screen that looks again several times a second: counts only.

    Raises:
        JobMissing: this tenant has no such job.
    """
    require_job(session, tenant, job_id)
    counts = dict(
        session.execute(
            select(ItemRow.state, func.count()).where(ItemRow.job_id == job_id).group_by(ItemRow.state)
        ).all()
    )
    total = sum(counts.values())
    unfinished = sum(counts.get(state, 0) for state in OPEN_STATES)
    documents = session.scalar(select(func.count(ItemRow.document_id.distinct())).where(ItemRow.job_id == job_id))
    ways = session.scalars(select(ReadingRow.way).where(ReadingRow.job_id == job_id)).all()
    wanted = select(ItemRow.document_id).where(ItemRow.job_id == job_id, ItemRow.state == ItemState.QUEUED)
    tokens, done = session.execute(
        select(
            func.coalesce(func.sum(SnapshotRow.num_tokens), 0), func.coalesce(func.sum(SnapshotRow.done_tokens), 0)
        ).where(
            SnapshotRow.tenant == tenant,
            SnapshotRow.state == SnapshotState.WRITING,
            SnapshotRow.owner.is_not(None),
            SnapshotRow.document_id.in_(wanted),
        )
    ).one()
    return Progress(
        items=total,
        items_done=total - unfinished,
        documents=documents or 0,
        documents_read=len(ways),
        reading_tokens=int(tokens),
        reading_done=int(done),
        found=sum(way == "found" for way in ways),
    )


def list_jobs(session: Session, tenant: str, limit: int) -> list[JobStatus]:
    """The newest jobs of a tenant."""
    ids = session.scalars(
        select(JobRow.job_id).where(JobRow.tenant == tenant).order_by(JobRow.created_at.desc()).limit(limit)
    ).all()
    return [job_status(session, tenant, job_id) for job_id in ids]
