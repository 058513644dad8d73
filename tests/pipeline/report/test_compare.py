import csv
import json
from pathlib import Path

import openpyxl
import pytest

from pipeline.errors import UnknownFormat
from pipeline.report.compare import Change, Comparison, Kind
from pipeline.report.compare_files import write_comparison
from storage.errors import JobMissing
from tests.pipeline.report.nights import ANSWERS, TENANT, Night


@pytest.fixture
def jobs(night: Night) -> tuple[str, str]:
    later = {**ANSWERS, "date": "2026-11-30", "cap": "EUR 3,000,000", "law": "Not found.", "kind": "non-exclusive."}
    first = night.job(
        [night.source("a.pdf"), night.source("gone.pdf", ("gone",)), night.source("old name.pdf", ("moved",))],
        {"a.pdf": ANSWERS, "gone.pdf": ANSWERS, "old name.pdf": ANSWERS},
    )
    second = night.job(
        [night.source("new.pdf", ("new",)), night.source("a.pdf", ("amended",)), night.source("name.pdf", ("moved",))],
        {"new.pdf": ANSWERS, "a.pdf": later, "name.pdf": ANSWERS},
    )
    return first, second


def comparison(night: Night, jobs: tuple[str, str]) -> Comparison:
    return Comparison(night.database, night.store, TENANT, *jobs)


def of(changes: list[Change], document: str) -> dict[str, str]:
    return {change.question_id: change.kind for change in changes if change.document == document}


def test_changed_answers_are_told_from_other_words_for_the_same(night: Night, jobs: tuple[str, str]) -> None:
    changes = list(comparison(night, jobs).changes())

    expected = dict.fromkeys(ANSWERS, Kind.SAME) | {"cap": Kind.ANSWER, "law": Kind.STATUS}
    assert of(changes, "a.pdf") == expected


def test_documents_come_and_go_and_are_found_again_under_another_name(night: Night, jobs: tuple[str, str]) -> None:
    found = comparison(night, jobs)
    changes = list(found.changes())

    assert list(dict.fromkeys(change.document for change in changes)) == ["new.pdf", "a.pdf", "name.pdf", "gone.pdf"]
    assert set(of(changes, "new.pdf").values()) == {Kind.ADDED}
    assert set(of(changes, "gone.pdf").values()) == {Kind.REMOVED}
    assert set(of(changes, "name.pdf").values()) == {Kind.SAME}
    record = found.record()
    assert (record["documents_added"], record["documents_removed"]) == (["new.pdf"], ["gone.pdf"])
    assert record["documents_changed"] == ["a.pdf"]
    assert (record["same"], record["answer_changed"], record["status_changed"]) == (14, 1, 1)


def test_a_job_is_the_same_as_itself(night: Night, jobs: tuple[str, str]) -> None:
    found = comparison(night, (jobs[0], jobs[0]))

    assert {change.kind for change in found.changes()} == {Kind.SAME}
    assert found.record()["same"] == 3 * len(ANSWERS)


def test_questions_come_and_go(night: Night) -> None:
    first = night.job([night.source("a.pdf")], {"a.pdf": ANSWERS})
    night.questions = [question for question in night.questions if question.question_id != "law"]
    second = night.job([night.source("a.pdf")], {"a.pdf": ANSWERS})

    forth, back = (comparison(night, pair) for pair in ((first, second), (second, first)))

    assert of(list(forth.changes()), "a.pdf")["law"] == Kind.REMOVED
    assert of(list(back.changes()), "a.pdf")["law"] == Kind.ADDED
    assert (forth.record()["questions_removed"], back.record()["questions_added"]) == (["law"], ["law"])


@pytest.mark.parametrize("same", [False, True])
def test_files_hold_the_changes_and_the_rest_where_asked(
    night: Night, jobs: tuple[str, str], tmp_path: Path, same: bool
) -> None:
    for ending in ("csv", "jsonl", "xlsx"):
        write_comparison(comparison(night, jobs), tmp_path / f"c.{ending}", same=same)

    with (tmp_path / "c.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = [(row["document"], row["question_id"], row["change"]) for row in csv.DictReader(file)]
    records = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    sheet = openpyxl.load_workbook(tmp_path / "c.xlsx")["Changes"]
    assert len(rows) == 18 + 14 * same
    assert rows == [(record["document"], record["question_id"], record["change"]) for record in records]
    assert [row[2].value for row in sheet.iter_rows(min_row=2)] == [change for _, _, change in rows]


def test_a_comparison_needs_two_jobs_and_a_known_ending(night: Night, jobs: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(JobMissing):
        comparison(night, (jobs[0], "nojob"))
    with pytest.raises(UnknownFormat, match=r"\.xlsx, \.csv, \.jsonl"):
        write_comparison(comparison(night, jobs), tmp_path / "c.html", same=False)
