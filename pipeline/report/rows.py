"""The rows of a report: one per source and question, with the place of each answer in its document."""

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pipeline.playbooks.answer_types import AnswerSpec, AnswerType
from pipeline.playbooks.values import says_not_found
from pipeline.report.cells import Cell, cell_of
from pipeline.report.evidence import DocumentIndex, Evidence
from storage.database import Database
from storage.documents import get_text
from storage.job_report import ReportRow, job_report
from storage.objects import ObjectStore

_BARE = 3  # words; a Yes or No without a reason stands everywhere and nowhere


@dataclass(frozen=True)
class ReportLine:
    row: ReportRow
    evidence: Evidence | None

    @cached_property
    def cell(self) -> Cell:
        return cell_of(self.row, self.evidence)

    @property
    def document(self) -> str:
        """The name without its folder."""
        return self.row.source.rpartition("/")[2]

    @property
    def question(self) -> str:
        """As a person wrote it."""
        return AnswerSpec.of(self.row.spec).question or self.row.question

    @property
    def page(self) -> int | None:
        return self.evidence.page if self.evidence else None

    def record(self) -> dict[str, Any]:
        """The line as a program takes it. Also the columns of the CSV, in this order."""
        row, cell = self.row, self.cell
        return {
            "document": row.source,
            "question_id": row.question_id,
            "title": row.title,
            "question": self.question,
            "type": cell.type.value,
            "status": cell.status.value,
            "answer": row.answer,
            "value": cell.value,
            "page": cell.page,
            "quote": cell.quote,
            "quote_start": cell.start,
            "quote_stop": cell.stop,
            "verified": cell.verified,
            "evidence": cell.evidence,
            "doubt": cell.doubt,
            "finish": row.finish,
            "state": row.state,
            "error_code": row.error_code,
            "error": row.error,
            "document_id": row.document_id,
            "cached_tokens": row.cached_tokens,
            "question_tokens": row.question_tokens,
            "output_tokens": row.output_tokens,
            "first_token_s": row.first_token_s,
            "total_s": row.total_s,
            "carried_from": row.carried_from,
            "way": row.way,
            "why": row.why,
        }

    def json_record(self) -> dict[str, Any]:
        """`record`, and what fits no cell: the logarithms of probabilities, where they were asked for."""
        logprobs = self.row.logprobs
        return self.record() if logprobs is None else {**self.record(), "logprobs": logprobs}


class LineInText(NamedTuple):
    """A line with the text of its document, where its answer was looked for."""

    line: ReportLine
    text: str | None


def report_lines(
    database: Database, store: ObjectStore, tenant: str, job_id: str, *, sources: Collection[int] | None = None
) -> Iterator[ReportLine]:
    """Every source × question in the order given, whatever became of it; also of a job that still runs.

    `sources` takes those at these positions only.
    """
    return (found.line for found in lines_in_text(database, store, tenant, job_id, sources=sources))


def lines_in_text(
    database: Database, store: ObjectStore, tenant: str, job_id: str, *, sources: Collection[int] | None = None
) -> Iterator[LineInText]:
    """As `report_lines`. One document is held in memory at a time."""
    with database.reading() as session:
        index: DocumentIndex | None = None
        indexed: str | None = None
        text: str | None = None
        for row in job_report(session, tenant, job_id, sources=sources):
            if row.document_id != indexed:
                index, text, indexed = None, None, row.document_id
            evidence = None
            if row.answer and row.document_id is not None and (row.quote is not None or _worth_looking(row)):
                if text is None:
                    text = get_text(store, tenant, row.document_id)
                evidence = quoted(row, text)
                if evidence is None and row.quote_prompt is None:
                    index = index or DocumentIndex(text, row.page_starts)
                    evidence = index.find(row.answer)
            yield LineInText(ReportLine(row, evidence), text)


def quoted(row: ReportRow, text: str) -> Evidence | None:
    """The words that the model quoted, if it did, as they stand in the document."""
    if row.quote is None or row.quote_start is None or row.quote_stop is None:
        return None
    words = text[row.quote_start : row.quote_stop]
    page = bisect_right(row.page_starts, row.quote_start)
    # The database drops what it cannot hold (NUL), the document does not.
    return Evidence(words, page, row.quote_start, row.quote_stop) if words.replace("\0", "") == row.quote else None


def _worth_looking(row: ReportRow) -> bool:
    answer = row.answer or ""
    if says_not_found(answer):
        return False
    return AnswerSpec.of(row.spec).type != AnswerType.YES_NO or len(answer.split()) > _BARE or len(answer) > 20
