"""A job read out from its rows, at any time: one row for each source and question."""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.progress import require_job
from storage.schema import AnswerRow, ItemRow, QuestionRow, SourceRow


@dataclass(frozen=True)
class ReportRow:
    """One source × one question, whatever became of it. `state` is an ItemState, or `unreadable`."""

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


def job_report(session: Session, tenant: str, job_id: str) -> Iterator[ReportRow]:
    """Every source × question, in the order given, also from a job that is still running."""
    require_job(session, tenant, job_id)
    questions = session.scalars(
        select(QuestionRow).where(QuestionRow.job_id == job_id).order_by(QuestionRow.position)
    ).all()
    sources = session.scalars(select(SourceRow).where(SourceRow.job_id == job_id).order_by(SourceRow.position)).all()
    for source in sources:
        found = session.execute(
            select(ItemRow, AnswerRow)
            .outerjoin(AnswerRow, AnswerRow.item_id == ItemRow.item_id)
            .where(ItemRow.job_id == job_id, ItemRow.document_id == source.document_id)
        ).all()
        items = {item.question_position: (item, answer) for item, answer in found}
        for question in questions:
            item, answer = items.get(question.position, (None, None))
            yield ReportRow(
                source_position=source.position,
                source=source.name,
                document_id=source.document_id,
                page_starts=tuple(source.page_starts),
                question_position=question.position,
                question_id=question.question_id,
                title=question.title,
                question=question.text,
                state=item.state if item else "unreadable",
                answer=answer.text if answer else None,
                finish=answer.finish if answer else None,
                error_code=item.error_code if item else source.error_code,
                error=item.error if item else source.error,
                cached_tokens=answer.cached_tokens if answer else None,
                question_tokens=answer.question_tokens if answer else None,
                output_tokens=answer.output_tokens if answer else None,
                first_token_s=answer.first_token_s if answer else None,
                total_s=answer.total_s if answer else None,
            )
