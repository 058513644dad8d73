"""A job read out from its rows, at any time: one row for each source and question."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.progress import require_job
from storage.schema import SPEC_PARAM, AnswerRow, ItemRow, QuestionRow, SourceRow


@dataclass(frozen=True)
class ReportRow:
    """One source × one question, whatever became of it. `state` is an ItemState, or `unreadable`; `carried_from` the
    item of an earlier job that the answer was first given to."""

    source_position: int
    source: str
    document_id: str | None
    page_starts: tuple[int, ...]
    question_position: int
    question_id: str
    title: str
    question: str
    state: str
    answer: str | None
    finish: str | None
    error_code: str | None
    error: str | None
    cached_tokens: int | None
    question_tokens: int | None
    output_tokens: int | None
    first_token_s: float | None
    total_s: float | None
    logprobs: list[dict[str, Any]] | None = None
    carried_from: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    quote_prompt: str | None = None
    quote: str | None = None
    quote_start: int | None = None
    quote_stop: int | None = None
    way: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class ReportQuestion:
    """A question of a job, as its reports head it."""

    question_id: str
    title: str
    text: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class ReportSource:
    position: int
    name: str
    document_id: str | None


def job_questions(session: Session, tenant: str, job_id: str) -> list[ReportQuestion]:
    """In the order given.

    Raises:
        JobMissing: this tenant has no such job.
    """
    require_job(session, tenant, job_id)
    rows = session.scalars(select(QuestionRow).where(QuestionRow.job_id == job_id).order_by(QuestionRow.position))
    return [ReportQuestion(row.question_id, row.title, row.text, row.params.get(SPEC_PARAM, {})) for row in rows]


def job_sources(session: Session, tenant: str, job_id: str) -> list[ReportSource]:
    """In the order given.

    Raises:
        JobMissing: this tenant has no such job.
    """
    require_job(session, tenant, job_id)
    rows = session.execute(
        select(SourceRow.position, SourceRow.name, SourceRow.document_id)
        .where(SourceRow.job_id == job_id)
        .order_by(SourceRow.position)
    )
    return [ReportSource(*row) for row in rows]


def job_report(
    session: Session, tenant: str, job_id: str, *, sources: Collection[int] | None = None
) -> Iterator[ReportRow]:
    """Every source × question, in the order given, also from a job that is still running.

    `sources` takes the sources at these positions only. One source is held in memory at a time.
    """
    questions = job_questions(session, tenant, job_id)
    for position in [source.position for source in job_sources(session, tenant, job_id)]:
        if sources is None or position in sources:
            yield from _source_report(session, job_id, position, questions)


def _source_report(
    session: Session, job_id: str, position: int, questions: list[ReportQuestion]
) -> Iterator[ReportRow]:
    source = session.execute(
        select(
            SourceRow.name, SourceRow.document_id, SourceRow.page_starts, SourceRow.error_code, SourceRow.error
        ).where(SourceRow.job_id == job_id, SourceRow.position == position)
    ).one()
    page_starts = tuple(source.page_starts)
    answer = AnswerRow
    found = session.execute(
        select(
            ItemRow.question_position,
            ItemRow.state,
            ItemRow.error_code,
            ItemRow.error,
            answer.text,
            answer.finish,
            answer.cached_tokens,
            answer.question_tokens,
            answer.output_tokens,
            answer.first_token_s,
            answer.total_s,
            answer.logprobs,
            answer.quote_prompt,
            answer.quote,
            answer.quote_start,
            answer.quote_stop,
            answer.carried_from,
            answer.way,
            answer.why,
        )
        .outerjoin(answer, answer.item_id == ItemRow.item_id)
        .where(ItemRow.job_id == job_id, ItemRow.document_id == source.document_id)
    ).all()
    items = {item.question_position: item for item in found}
    for number, question in enumerate(questions):
        item = items.get(number)
        yield ReportRow(
            source_position=position,
            source=source.name,
            document_id=source.document_id,
            page_starts=page_starts,
            question_position=number,
            question_id=question.question_id,
            title=question.title,
            question=question.text,
            state=item.state if item else "unreadable",
            answer=item.text if item else None,
            finish=item.finish if item else None,
            error_code=item.error_code if item else source.error_code,
            error=item.error if item else source.error,
            cached_tokens=item.cached_tokens if item else None,
            question_tokens=item.question_tokens if item else None,
            output_tokens=item.output_tokens if item else None,
            first_token_s=item.first_token_s if item else None,
            total_s=item.total_s if item else None,
            logprobs=item.logprobs if item else None,
            carried_from=item.carried_from if item else None,
            spec=question.spec,
            quote_prompt=item.quote_prompt if item else None,
            quote=item.quote if item else None,
            quote_start=item.quote_start if item else None,
            quote_stop=item.quote_stop if item else None,
            way=item.way if item else None,
            why=item.why if item else None,
        )
