"""The rule by which the answers of a document's sections become one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.playbooks.answer_types import AnswerType
from pipeline.report.cells import Cell, CellStatus, cell_of
from pipeline.report.compare import Comparison, Kind
from pipeline.report.evidence import Evidence
from pipeline.report.files import write_reports
from pipeline.report.merging import merge
from storage.job_report import ReportRow
from tests.pipeline.report.nights import TENANT, Night, split_job

ROW = ReportRow(0, "a.pdf", "d", (0, 100, 200), 0, "q", "Q", "Q?", "answered")


def cell(
    answer: str | None, at: int | None = None, *, kind: AnswerType = AnswerType.TEXT, state: str = "answered"
) -> Cell:
    """Of a section that gave this answer, with a quote of ten characters at a place of the whole document."""
    error = "It failed." if state == "failed" else None
    row = replace(ROW, answer=answer, state=state, error=error, spec={"type": kind, "choices": ["full", "partial"]})
    evidence = None if at is None else Evidence(f"words at {at}"[:10], at // 100 + 1, at, at + 10)
    return cell_of(row, evidence)


def merged(*cells: Cell) -> Cell:
    return merge(ROW, cells)[1]


@pytest.mark.parametrize(
    ("kind", "answers", "shown", "value"),
    [
        (
            AnswerType.DATE,
            [("2026-01-05", 5), ("Not found", None), ("5 January 2026", 105)],
            "2026-01-05",
            "2026-01-05",
        ),
        (AnswerType.DATE, [("2026-01-05", None), ("2027-02-06", 105)], "2027-02-06", "2027-02-06"),
        (AnswerType.DATE, [("sometime", 5), ("2027-02-06", None)], "2027-02-06", "2027-02-06"),
        (AnswerType.YES_NO, [("No", None), ("Yes", 5), ("No", None)], "Yes", True),
        (AnswerType.YES_NO, [("No", 5), ("Yes", 105)], "No (p. 1); Yes (p. 2)", None),
        (AnswerType.MONEY, [("EUR 5", 5), ("5 EUR", 205), ("USD 7", 105)], "EUR 5 (p. 1, 3); USD 7 (p. 2)", None),
        (AnswerType.CHOICE, [("full", 5), ("Full.", 105)], "full", "full"),
        (AnswerType.LIST, [("A\nB", 5), ("B\nC", 105)], "A; B; C", ["A", "B", "C"]),
        (AnswerType.TEXT, [("In Paris.", 5), ("Not found", None), ("in  paris", 105)], "In Paris.", "In Paris."),
        (AnswerType.TEXT, [("Paris.", 5), ("London.", None)], "Paris. (p. 1); London.", None),
    ],
)
def test_the_best_supported_values_count_each_once(
    kind: AnswerType, answers: list[tuple[str, int | None]], shown: str, value: Any
) -> None:
    found = merged(*(cell(answer, at, kind=kind) for answer, at in answers))

    assert (found.status, found.shown, found.value) == (CellStatus.ANSWERED, shown, value)
    assert found.merged is not None
    assert found.merged.sections == len(answers)


def test_equal_values_keep_the_evidence_of_all_and_an_overlap_counts_once() -> None:
    found = merged(cell("Paris", 95), cell("Paris", 95), cell("Paris", 230))

    assert [(quote.page, quote.start) for quote in found.quotes] == [(1, 95), (3, 230)]
    assert (found.page, found.start, found.verified) == (1, 95, True)
    assert found.merged is not None and found.merged.values[0].sections == (1, 2, 3)


def test_different_values_are_a_doubt_and_different_texts_are_not() -> None:
    dates = merged(cell("2026-01-05", 5, kind=AnswerType.DATE), cell("2027-01-05", 105, kind=AnswerType.DATE))

    assert dates.doubt == "2 different answers"
    assert merged(cell("Paris", 5), cell("London", 105)).doubt is None


def test_a_failed_section_leaves_an_answer_with_a_doubt_and_a_not_found_as_an_error() -> None:
    failed = cell(None, state="failed")

    answered_row, answered = merge(ROW, (cell("Paris", 5), failed))
    lost_row, lost = merge(ROW, (cell("Not found"), failed))
    _, all_failed = merge(replace(ROW, state="failed", error="It failed."), (failed, failed))
    _, found_nowhere = merge(ROW, (cell("Not found"), cell("Not found.")))

    assert (answered_row.state, answered.status) == ("answered", CellStatus.ANSWERED)
    assert answered.doubt == "1 of 2 sections have no answer: It failed."
    assert (lost_row.state, lost_row.error_code, lost.status) == ("failed", "sections_failed", CellStatus.ERROR)
    assert (all_failed.status, all_failed.text) == (CellStatus.ERROR, "It failed.")
    assert found_nowhere.status == CellStatus.NOT_FOUND


def test_while_sections_wait_the_answer_is_pending_and_shows_what_is_there() -> None:
    waiting = cell(None, state="queued")

    row, found = merge(replace(ROW, state="running"), (cell("Paris", 5), waiting))
    _, nothing = merge(replace(ROW, state="queued"), (waiting, waiting))

    assert (found.status, found.text) == (CellStatus.PENDING, "in work: 1 of 2 sections; so far: Paris")
    assert (row.answer, found.value, found.page) == ("Paris", None, 1)
    assert (nothing.status, nothing.text) == (CellStatus.PENDING, "waiting")


@pytest.fixture
def long_job(night: Night) -> str:
    return split_job(night)


def test_every_format_has_one_row_a_question_and_says_that_it_was_merged(
    night: Night, long_job: str, tmp_path: Path
) -> None:
    paths = [tmp_path / f"a.{ending}" for ending in ("xlsx", "html", "csv", "jsonl", "md")]

    summary = write_reports(night.database, night.store, TENANT, long_job, paths)

    records = {one["question_id"]: one for one in map(json.loads, paths[3].read_text().splitlines())}
    assert summary.rows == len(records) == len(night.questions)
    law, text = records["law"], night.text(night.source("in/long.pdf"))
    assert (law["status"], law["answer"], law["page"]) == ("answered", "the laws of England and Wales", 3)
    assert text[law["quote_start"] : law["quote_stop"]] == law["quote"]
    assert law["merged"]["sections"] == 2 and law["merged"]["values"][0]["sections"] == [2]
    assert [section["status"] for section in law["sections"]] == ["not_found", "answered"]
    assert records["date"]["value"] == "2026-11-30"
    assert records["assign"]["value"] is None and "different answers" in records["assign"]["doubt"]
    assert (records["cap"]["status"], records["cap"]["error_code"]) == ("error", "sections_failed")
    for path in paths[2], paths[4]:
        assert path.read_text(encoding="utf-8-sig").count("merged: 2 sections") == len(records)
    assert summary.answered == len(records) - 1


def test_the_same_answers_of_another_night_are_the_same(night: Night, long_job: str) -> None:
    again = split_job(night)

    comparison = Comparison(night.database, night.store, TENANT, long_job, again)

    assert {change.kind for change in comparison.changes()} == {Kind.SAME}
