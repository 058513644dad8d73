"""How far jobs are, in numbers. Every query costs the same among a million items as among ten."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import and_, exists, func, select
from sqlalchemy.orm import Session

from storage.errors import JobMissing
from storage.schema import (
    COUNTS,
    OPEN_STATES,
    AnswerRow,
    ItemRow,
    ItemState,
    JobRow,
    QuestionRow,
    ReadingRow,
    SectionRow,
    SnapshotRow,
    SnapshotState,
    SourceRow,
)
from storage.spans import joined
from storage.tiers import Tier
from storage.ways import Way


@dataclass(frozen=True)
class JobStatus:
    """A job in numbers. `items` counts by state; `rows` is sources × questions, what the report will hold. `split`
    documents are read in `sections`, of which each has items of its own."""

    job_id: str
    title: str
    model: str
    created_at: datetime
    cancelled_at: datetime | None
    finished_at: datetime | None
    not_before: datetime | None
    answer_by: datetime | None
    tier: Tier
    sources: int
    sources_failed: int
    questions: int
    split: int
    sections: int
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


def require_job(session: Session, tenant: str, job_id: str) -> JobRow:
    job = session.scalar(select(JobRow).where(JobRow.job_id == job_id, JobRow.tenant == tenant))
    if job is None:
        raise JobMissing(job_id)
    return job


def job_status(session: Session, tenant: str, job_id: str) -> JobStatus:
    """
    Raises:
        JobMissing: this tenant has no such job.
    """
    job = require_job(session, tenant, job_id)
    source_count, failed_count = session.execute(
        select(func.count(), func.count(SourceRow.error_code)).where(SourceRow.job_id == job_id)
    ).one()
    questions = session.scalar(select(func.count()).select_from(QuestionRow).where(QuestionRow.job_id == job_id))
    split, sections = session.execute(
        select(func.count(SectionRow.document_id.distinct()), func.count(SectionRow.section_id.distinct())).where(
            SectionRow.job_id == job_id
        )
    ).one()
    return JobStatus(
        job_id=job_id,
        title=job.title,
        model=job.model,
        created_at=job.created_at,
        cancelled_at=job.cancelled_at,
        finished_at=job.finished_at,
        not_before=job.not_before,
        answer_by=job.answer_by,
        tier=Tier(job.tier),
        sources=source_count,
        sources_failed=failed_count,
        questions=questions or 0,
        split=split,
        sections=sections,
        items=_counts(session, job),
    )


def _counts(session: Session, job: JobRow) -> dict[ItemState, int]:
    """Of the job's own counts; only what runs is counted in the items, which are few."""
    of_job = ItemRow.job_id == job.job_id
    running = session.scalar(select(func.count()).where(of_job, ItemRow.state == ItemState.RUNNING)) or 0
    is_held = session.scalar(select(exists().where(of_job, ItemRow.state == ItemState.HELD)))
    found = {
        ItemState.HELD if is_held else ItemState.QUEUED: job.num_open - running,
        ItemState.RUNNING: running,
        **{state: int(getattr(job, column)) for state, column in COUNTS.items()},
    }
    return {state: count for state, count in found.items() if count}


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


@dataclass(frozen=True)
class Timing:
    """Sums over a job's answers. `decode_s` is the time during which at least one was being decoded."""

    cached_tokens: int
    output_tokens: int
    decode_s: float


def job_timing(session: Session, job_id: str) -> Timing:
    """Counts every answer once, also where several sources share it, and none that an earlier job gave."""
    rows = session.execute(
        select(*DECODED, AnswerRow.cached_tokens)
        .join(ItemRow, ItemRow.item_id == AnswerRow.item_id)
        .where(ItemRow.job_id == job_id, AnswerRow.carried_from.is_(None))
    ).all()
    return Timing(sum(row.cached_tokens for row in rows), sum(row.output_tokens for row in rows), decode_s(rows))


# What `decode_s` needs of each answer.
DECODED = (
    AnswerRow.created_at,
    AnswerRow.total_s,
    AnswerRow.first_token_s,
    AnswerRow.output_tokens,
    AnswerRow.way,
)


def decode_s(answers: Iterable[Any]) -> float:
    """Seconds during which at least one was being decoded. In one piece, the time to the first token is that of reading
    the document."""
    return busy_s(
        [
            (row.created_at.timestamp(), row.total_s if row.way == Way.SPLIT else row.total_s - row.first_token_s)
            for row in answers
        ]
    )


def busy_s(spans: list[tuple[float, float]]) -> float:
    """Seconds covered by spans, each given by its end and its length."""
    return sum(stop - start for start, stop in joined((stop - length, stop) for stop, length in spans))


@dataclass(frozen=True)
class Progress:
    """How far a job is. A section counts as a document. Tokens count the documents whose prefill has begun and is not
    yet noted as done."""

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
    job = require_job(session, tenant, job_id)
    is_section = and_(SectionRow.job_id == SourceRow.job_id, SectionRow.document_id == SourceRow.document_id)
    documents = session.scalar(
        select(func.count(func.coalesce(SectionRow.section_id, SourceRow.document_id).distinct()))
        .select_from(SourceRow)
        .outerjoin(SectionRow, is_section)
        .where(SourceRow.job_id == job_id)
    )
    ways = session.scalars(select(ReadingRow.way).where(ReadingRow.job_id == job_id)).all()
    is_wanted = exists().where(
        ItemRow.tenant == SnapshotRow.tenant,
        ItemRow.document_id == SnapshotRow.document_id,
        ItemRow.state == ItemState.QUEUED,
        ItemRow.job_id == job_id,
    )
    tokens, done = session.execute(
        select(
            func.coalesce(func.sum(SnapshotRow.num_tokens), 0), func.coalesce(func.sum(SnapshotRow.done_tokens), 0)
        ).where(
            SnapshotRow.tenant == tenant,
            SnapshotRow.state == SnapshotState.WRITING,
            SnapshotRow.owner.is_not(None),
            is_wanted,
        )
    ).one()
    return Progress(
        items=job.num_items,
        items_done=job.num_items - job.num_open,
        documents=documents or 0,
        documents_read=len(ways),
        reading_tokens=int(tokens),
        reading_done=int(done),
        found=sum(way == "found" for way in ways),
    )


def list_jobs(session: Session, tenant: str, limit: int, *, only_open: bool = False) -> list[JobStatus]:
    """The newest jobs of a tenant, or of those that have not ended."""
    wanted = [JobRow.finished_at.is_(None)] if only_open else []
    ids = session.scalars(
        select(JobRow.job_id).where(JobRow.tenant == tenant, *wanted).order_by(JobRow.created_at.desc()).limit(limit)
    ).all()
    return [job_status(session, tenant, job_id) for job_id in ids]
