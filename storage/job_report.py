"""A job read out from its rows, at any time: one row for each source and question."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.progress import require_job
from storage.schema import (
    OPEN_STATES,
    SPEC_PARAM,
    AnswerRow,
    ItemRow,
    ItemState,
    QuestionRow,
    SectionRow,
    SourceRow,
)


@dataclass(frozen=True)
class ReportRow:
    """One source × one question, whatever became of it. `state` is an ItemState, or `unreadable`; `carried_from` the
    item of an earlier job that the answer was first given to.

    Of a document that is read in `sections`, the tokens and seconds are sums, `first_token_s` is the slowest section's,
    and there is no answer: each section has its own. It is open as long as one of them is, answered when one is.
    """

    source_position: int
    source: str
    document_id: str | None
    page_starts: tuple[int, ...]
    question_position: int
    question_id: str
    title: str
    question: str
    state: str
    answer: str | None = None
    finish: str | None = None
    error_code: str | None = None
    error: str | None = None
    cached_tokens: int | None = None
    question_tokens: int | None = None
    output_tokens: int | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    logprobs: list[dict[str, Any]] | None = None
    carried_from: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    quote_prompt: str | None = None
    quote: str | None = None
    quote_start: int | None = None
    quote_stop: int | None = None
    way: str | None = None
    why: str | None = None
    sections: "tuple[ReportSection, ...]" = ()


class ReportSection(NamedTuple):
    """Document text [start, stop) and what became of the question there. Page starts, and places in the row, count from
    the section's beginning; pages before it begin at negative places."""

    start: int
    stop: int
    row: ReportRow


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
    spans: dict[str | None, list[_Span]] = {}
    for row in session.scalars(select(SectionRow).where(SectionRow.job_id == job_id).order_by(SectionRow.position)):
        spans.setdefault(row.document_id, []).append(_Span(row.section_id, row.start, row.stop))
    for position in [source.position for source in job_sources(session, tenant, job_id)]:
        if sources is None or position in sources:
            yield from _source_report(session, job_id, position, questions, spans)


class _Span(NamedTuple):
    section_id: str
    start: int
    stop: int


def _source_report(
    session: Session,
    job_id: str,
    position: int,
    questions: list[ReportQuestion],
    spans: dict[str | None, list[_Span]],
) -> Iterator[ReportRow]:
    source = session.execute(
        select(
            SourceRow.name, SourceRow.document_id, SourceRow.page_starts, SourceRow.error_code, SourceRow.error
        ).where(SourceRow.job_id == job_id, SourceRow.position == position)
    ).one()
    sections = spans.get(source.document_id, [])
    found = _items(session, job_id, [section.section_id for section in sections] or [source.document_id])
    begun: dict[str, Any] = {
        "source_position": position,
        "source": source.name,
        "document_id": source.document_id,
        "page_starts": tuple(source.page_starts),
    }
    unreadable: dict[str, Any] = {"state": "unreadable", "error_code": source.error_code, "error": source.error}
    for number, question in enumerate(questions):
        asked: dict[str, Any] = {
            "question_position": number,
            "question_id": question.question_id,
            "title": question.title,
            "question": question.text,
            "spec": question.spec,
        }
        if sections:
            row = ReportRow(**begun, **asked, **unreadable)
            parts = tuple(
                ReportSection(start, stop, _of_section(row, section_id, start, found.get((section_id, number))))
                for section_id, start, stop in sections
            )
            yield replace(row, sections=parts, **_whole(parts))
        else:
            yield ReportRow(**begun, **asked, **found.get((source.document_id, number), unreadable))


def _items(session: Session, job_id: str, document_ids: list[str | None]) -> dict[tuple[str, int], dict[str, Any]]:
    """What became of the questions, by document and position."""
    answer = AnswerRow
    found = session.execute(
        select(
            ItemRow.document_id,
            ItemRow.question_position,
            ItemRow.state,
            ItemRow.error_code,
            ItemRow.error,
            answer.text.label("answer"),
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
        .where(ItemRow.job_id == job_id, ItemRow.document_id.in_(document_ids))
    ).all()
    items = [dict(item._mapping) for item in found]
    return {(item.pop("document_id"), item.pop("question_position")): item for item in items}


def _of_section(row: ReportRow, section_id: str, start: int, item: dict[str, Any] | None) -> ReportRow:
    row = replace(row, document_id=section_id, page_starts=tuple(at - start for at in row.page_starts))
    if item is None:
        gone = "This section of the document was forgotten on request."
        return replace(row, state=ItemState.FAILED, error_code="forgotten", error=gone)
    return replace(row, **item)


def _whole(sections: tuple[ReportSection, ...]) -> dict[str, Any]:
    """State, costs and origin of a row, from those of its sections."""
    rows = [section.row for section in sections]
    answered = [row for row in rows if row.state == ItemState.ANSWERED]
    failed = [row for row in rows if row.error is not None]
    still_open = [row.state for row in rows if row.state in OPEN_STATES]
    if still_open:
        begun = len(still_open) < len(rows) or ItemState.RUNNING in still_open
        state = ItemState.RUNNING if begun else still_open[0]
    else:
        state = ItemState.ANSWERED if answered else (failed or rows)[0].state
    sums = {
        name: sum(getattr(row, name) for row in answered) if answered else None
        for name in ("cached_tokens", "question_tokens", "output_tokens", "total_s")
    }
    carried = [row.carried_from for row in answered]
    return {
        "state": state,
        "error_code": failed[0].error_code if failed and state == ItemState.FAILED else None,
        "error": failed[0].error if failed and state == ItemState.FAILED else None,
        "finish": next((row.finish for row in answered if row.finish != "stop"), answered[0].finish)
        if answered
        else None,
        "first_token_s": max((row.first_token_s or 0.0 for row in answered), default=None),
        "carried_from": carried[0] if carried and None not in carried else None,
        "way": _common([row.way for row in answered]),
        "why": _common([row.why for row in answered]),
        **sums,
    }


def _common(values: list[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None
