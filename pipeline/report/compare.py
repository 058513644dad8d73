"""What changed between two jobs: documents, questions, and the answers that both have."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pipeline.report.cells import Cell
from pipeline.report.rows import ReportLine, report_lines
from storage.database import Database
from storage.job_report import ReportSource, job_questions, job_sources
from storage.objects import ObjectStore


class Kind(StrEnum):
    SAME = "same"
    ANSWER = "answer changed"
    STATUS = "status changed"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True)
class Change:
    """One document and question in two jobs. `text_changed`: the document has the same name but another text."""

    kind: Kind
    document: str
    question_id: str
    title: str
    before: Cell | None
    after: Cell | None
    text_changed: bool = False

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "document": self.document,
            "question_id": self.question_id,
            "title": self.title,
            "change": self.kind.value,
            "text_changed": self.text_changed,
        }
        for name, cell in (("before", self.before), ("after", self.after)):
            found[f"{name}_status"] = cell.status.value if cell else None
            found[f"{name}_answer"] = cell.shown if cell else None
            found[f"{name}_page"] = cell.page if cell else None
            found[f"{name}_merged"] = cell.merged.note if cell and cell.merged else None
        return found


class Pair(NamedTuple):
    name: str
    before: ReportSource | None
    after: ReportSource | None


class Comparison:
    """Two jobs of one tenant, the earlier first. Holds two documents' answers at a time.

    Documents belong together by name, several of one name in their order; what is left over by its text, so that a
    renamed file is found again. Questions belong together by id.

    Raises:
        JobMissing: this tenant has no such job.
    """

    def __init__(self, database: Database, store: ObjectStore, tenant: str, before: str, after: str) -> None:
        self._database, self._store, self._tenant = database, store, tenant
        self._jobs = before, after
        with database.reading() as session:
            sources = [job_sources(session, tenant, job) for job in self._jobs]
            questions = [
                {question.question_id for question in job_questions(session, tenant, job)} for job in self._jobs
            ]
        self.pairs = _paired(*sources)
        self.added_questions = sorted(questions[1] - questions[0])
        self.removed_questions = sorted(questions[0] - questions[1])
        self.counts: Counter[Kind] = Counter()

    def changes(self) -> Iterator[Change]:
        """Every document and question, the same ones too: those of the later job in its order, then what is gone."""
        for pair in self.pairs:
            before, after = (
                {line.row.question_id: line for line in self._lines(job, source)}
                for job, source in zip(self._jobs, (pair.before, pair.after), strict=True)
            )
            for question_id in [*after, *(gone for gone in before if gone not in after)]:
                change = _change(pair, before.get(question_id), after.get(question_id))
                self.counts[change.kind] += 1
                yield change

    def _lines(self, job_id: str, source: ReportSource | None) -> list[ReportLine]:
        if source is None:
            return []
        return list(report_lines(self._database, self._store, self._tenant, job_id, sources={source.position}))

    def record(self) -> dict[str, Any]:
        """The comparison in numbers, once its changes were run through."""
        return {
            "before": self._jobs[0],
            "after": self._jobs[1],
            "documents": len(self.pairs),
            "documents_added": [pair.name for pair in self.pairs if pair.before is None],
            "documents_removed": [pair.name for pair in self.pairs if pair.after is None],
            "documents_changed": [pair.name for pair in self.pairs if _text_changed(pair)],
            "questions_added": self.added_questions,
            "questions_removed": self.removed_questions,
            **{kind.value.replace(" ", "_"): self.counts[kind] for kind in Kind},
        }


def _paired(before: list[ReportSource], after: list[ReportSource]) -> list[Pair]:
    waiting: dict[str, list[ReportSource]] = {}
    for source in before:
        waiting.setdefault(source.name, []).append(source)
    partners = {source.position: waiting[source.name].pop(0) for source in after if waiting.get(source.name)}
    left = [source for sources in waiting.values() for source in sources]
    for source in after:
        if source.position in partners or source.document_id is None:
            continue
        partner = next((one for one in left if one.document_id == source.document_id), None)
        if partner is not None:
            partners[source.position] = partner
            left.remove(partner)
    pairs = [Pair(source.name, partners.get(source.position), source) for source in after]
    return pairs + [Pair(source.name, source, None) for source in sorted(left, key=lambda source: source.position)]


def _text_changed(pair: Pair) -> bool:
    if pair.before is None or pair.after is None:
        return False
    return pair.before.document_id != pair.after.document_id


def _change(pair: Pair, before: ReportLine | None, after: ReportLine | None) -> Change:
    line = after or before
    assert line is not None
    return Change(
        _kind(before, after),
        pair.name,
        line.row.question_id,
        line.row.title,
        before.cell if before else None,
        after.cell if after else None,
        _text_changed(pair),
    )


def _kind(before: ReportLine | None, after: ReportLine | None) -> Kind:
    if before is None:
        return Kind.ADDED
    if after is None:
        return Kind.REMOVED
    old, new = before.cell, after.cell
    if old.status != new.status:
        return Kind.STATUS
    # Other words for the same date, amount or choice are the same answer.
    typed = old.parsed and new.parsed and old.type == new.type
    same = old.value == new.value if typed else old.text.split() == new.text.split()
    return Kind.SAME if same else Kind.ANSWER
