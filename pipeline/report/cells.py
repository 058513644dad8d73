"""What a report shows for one document and question."""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipeline.playbooks.answer_types import AnswerSpec, AnswerType
from pipeline.playbooks.values import ValueStatus, read_value
from pipeline.report.evidence import Evidence
from pipeline.report.merged import Merged
from storage.job_report import ReportRow
from storage.schema import OPEN_STATES, ItemState


class CellStatus(StrEnum):
    ANSWERED = "answered"
    NOT_FOUND = "not_found"
    ERROR = "error"
    PENDING = "pending"


class EvidenceFrom(StrEnum):
    QUOTED = "quoted"  # by the model, which was asked for the words of the document
    FOUND = "found"  # by searching the document for the answer's words
    NONE = "none"  # the model was asked and named none


@dataclass(frozen=True)
class Cell:
    """An answer with its evidence, whoever found it.

    `text` is the answer's words, or why there is none. `value` is theirs in the question's type (see TypedValue), and
    `parsed` is false where the words hold no such value. `quote` is document text [start, stop), which begins on
    `page`; `verified` says that it was found there verbatim, `evidence` who found it. `doubt` is what a
    reader should look at. `merged` is there where the document was read in sections; `quote` is then the first of its
    quotes.
    """

    status: CellStatus
    type: AnswerType
    text: str
    value: Any = None
    parsed: bool = False
    quote: str | None = None
    page: int | None = None
    start: int | None = None
    stop: int | None = None
    verified: bool = False
    evidence: EvidenceFrom | None = None
    doubt: str | None = None
    merged: Merged | None = None

    @property
    def quotes(self) -> tuple[Evidence, ...]:
        """Every place that shows the answer, or one of the answers."""
        if self.merged is not None:
            return tuple(quote for value in self.merged.values for quote in value.quotes)
        if self.quote is None or self.page is None or self.start is None or self.stop is None:
            return ()
        return (Evidence(self.quote, self.page, self.start, self.stop),)

    @property
    def pages(self) -> list[int]:
        return sorted({quote.page for quote in self.quotes})

    @property
    def shown(self) -> str:
        """The value as people write it; the words where there is none, or where words are asked for."""
        several = self.merged is not None and len(self.merged.values) > 1 and self.status == CellStatus.ANSWERED
        if self.merged is not None and several and not self.parsed:
            return self.merged.listed
        return show_value(self.type, self.value, self.text) if self.parsed else self.text


def cell_of(row: ReportRow, evidence: Evidence | None) -> Cell:
    spec = AnswerSpec.of(row.spec)
    if row.state in OPEN_STATES:
        return Cell(CellStatus.PENDING, spec.type, "in work" if row.state == ItemState.RUNNING else "waiting")
    if row.state != ItemState.ANSWERED or row.answer is None:
        return Cell(CellStatus.ERROR, spec.type, row.error or row.state)
    text = row.answer.strip()
    read = read_value(text, spec.type, spec.choices)
    if read.status == ValueStatus.NOT_FOUND:
        return Cell(CellStatus.NOT_FOUND, spec.type, text)
    parsed = read.status == ValueStatus.PARSED
    doubts = [] if parsed else [f"no {_NAMES[spec.type]} in these words" if text else "empty answer"]
    if spec.quote and evidence is None:
        doubts.append("no quote" if row.quote_prompt is None else "the model names no words of the document for it")
    found = evidence._asdict() if evidence else {}
    return Cell(
        CellStatus.ANSWERED,
        spec.type,
        text,
        read.value,
        parsed,
        **found,
        verified=evidence is not None,
        evidence=_evidence_from(row, evidence),
        doubt="; ".join(doubts) or None,
    )


def _evidence_from(row: ReportRow, evidence: Evidence | None) -> EvidenceFrom | None:
    if evidence is None:
        return EvidenceFrom.NONE if row.quote_prompt is not None else None
    return EvidenceFrom.QUOTED if row.quote_prompt is not None else EvidenceFrom.FOUND


_CJK = re.compile(r"[\u3400-\u9fff]")
_NAMES = {
    AnswerType.TEXT: "text",
    AnswerType.YES_NO: "yes or no",
    AnswerType.DATE: "single full date",
    AnswerType.MONEY: "single amount of money",
    AnswerType.CHOICE: "single choice",
    AnswerType.LIST: "list",
    AnswerType.JSON: "JSON",
}


def show_value(answer_type: AnswerType, value: Any, words: str) -> str:
    match answer_type:
        case AnswerType.YES_NO:
            return ("是" if value else "否") if _CJK.search(words) else ("Yes" if value else "No")
        case AnswerType.MONEY:
            whole, point, cents = value["amount"].partition(".")
            return f"{value['currency'] or ''} {int(whole):,}{point}{cents}".strip()
        case AnswerType.LIST:
            return "; ".join(value)
        case AnswerType.JSON:
            return json.dumps(value, ensure_ascii=False)
    return str(value)
