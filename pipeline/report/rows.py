"""The rows of a report: one per source and question, with the place of each answer in its document."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from pipeline.playbooks.answer_types import AnswerSpec, AnswerType
from pipeline.playbooks.values import says_not_found
from pipeline.report.cells import Cell, cell_of
from pipeline.report.evidence import Evidence, find_all
from pipeline.report.merging import merge
from storage.database import Database
from storage.documents import get_text
from storage.job_report import ReportRow, ReportSection, job_report
from storage.objects import ObjectStore

_BARE = 3  # words; a Yes or No without a reason stands everywhere and nowhere


@dataclass(frozen=True)
class ReportLine:
    """`sections` are those of a long document, each with what its own answer would show."""

    row: ReportRow
    cell: Cell
    sections: tuple[Cell, ...] = ()

    @property
    def document(self) -> str:
        """The name without its folder."""
        return self.row.source.rpartition("/")[2]

    @property
    def question(self) -> str:
        """As a person wrote it."""
        return AnswerSpec.of(self.row.spec).question or self.row.question

    def record(self) -> dict[str, Any]:
        """The line as a program takes it. Also the columns of the CSV, in this order."""
        row, cell = self.row, self.cell
        return {
            "document": row.source,
            "question_id": row.question_id,
            "title": row.title,
            "question": self.question,
            "type": cell.type.value,
            **_answer_record(row, cell),
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
            "merged": cell.merged.note if cell.merged else None,
        }

    def json_record(self) -> dict[str, Any]:
        """`record`, and what fits no cell: the logarithms of probabilities, where they were asked for, and what each
        section of a long document answered."""
        record, row = self.record(), self.row
        if row.logprobs is not None:
            record["logprobs"] = row.logprobs
        if self.cell.merged is not None:
            record["merged"] = self.cell.merged.record()
            pairs = zip(row.sections, self.sections, strict=True)
            record["sections"] = [_section_record(section, cell) for section, cell in pairs]
        return record


def _answer_record(row: ReportRow, cell: Cell) -> dict[str, Any]:
    return {
        "status": cell.status.value,
        "answer": row.answer,
        "value": cell.value,
        "page": cell.page,
        "quote": cell.quote,
        "quote_start": cell.start,
        "quote_stop": cell.stop,
    }


def _section_record(section: ReportSection, cell: Cell) -> dict[str, Any]:
    row = section.row
    record = {
        "start": section.start,
        "stop": section.stop,
        "document_id": row.document_id,
        **_answer_record(row, cell),
        "state": row.state,
        "error_code": row.error_code,
        "error": row.error,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.output_tokens,
    }
    return record if row.logprobs is None else {**record, "logprobs": row.logprobs}


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
        rows = job_report(session, tenant, job_id, sources=sources)
        for _, group in groupby(rows, key=lambda row: (row.source_position, row.document_id)):
            yield from _Document(list(group), store, tenant).lines()


class _Document:
    """The rows of one source. Its text is fetched only where an answer is looked for in it."""

    def __init__(self, rows: list[ReportRow], store: ObjectStore, tenant: str) -> None:
        self._rows = rows
        self._store, self._tenant = store, tenant
        self._text: str | None = None
        self._places: dict[tuple[int, int], Evidence | None] = {}  # by the question's position and section's start

    def _asked(self) -> dict[tuple[int, int | None], list[ReportRow]]:
        """Answers to look for, by the part [start, stop) of the text in which they are."""
        asked: dict[tuple[int, int | None], list[ReportRow]] = defaultdict(list)
        for row in self._rows:
            for start, stop, part in row.sections or ((0, None, row),):
                if part.answer and row.document_id is not None and (part.quote is not None or _worth_looking(part)):
                    asked[start, stop].append(part)
        return asked

    def _look(self, start: int, stop: int | None, rows: list[ReportRow]) -> None:
        if self._text is None:
            self._text = get_text(self._store, self._tenant, self._rows[0].document_id or "")
        text, left = self._text[start:stop], []
        for row in rows:
            place = quoted(row, text)
            self._places[row.question_position, start] = place
            if place is None and row.quote_prompt is None:
                left.append(row)
        if left:
            found = find_all(text, rows[0].page_starts, [row.answer or "" for row in left])
            self._places.update(((row.question_position, start), place) for row, place in zip(left, found, strict=True))

    def lines(self) -> Iterator[LineInText]:
        for (start, stop), rows in self._asked().items():
            self._look(start, stop, rows)
        for row in self._rows:
            if row.sections:
                cells = tuple(self._section_cell(section) for section in row.sections)
                yield LineInText(ReportLine(*merge(row, cells), cells), self._text)
            else:
                place = self._places.get((row.question_position, 0))
                yield LineInText(ReportLine(row, cell_of(row, place)), self._text)

    def _section_cell(self, section: ReportSection) -> Cell:
        place = self._places.get((section.row.question_position, section.start))
        if place is not None:
            place = place._replace(start=place.start + section.start, stop=place.stop + section.start)
        return cell_of(section.row, place)


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
