import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.report.evidence import Evidence
from pipeline.report.files import write_csv, write_files, write_jsonl
from pipeline.report.rows import ReportLine
from storage.job_report import ReportRow

ROW = ReportRow(
    source_position=0,
    source="contracts/Vertrag Müller.pdf",
    document_id="0" * 64,
    page_starts=(0, 40),
    question_position=0,
    question_id="cap",
    title="Cap",
    question="What is the cap?",
    state="answered",
    answer="EUR 2,500,000",
    finish="stop",
    error_code=None,
    error=None,
    cached_tokens=5000,
    question_tokens=12,
    output_tokens=7,
    first_token_s=0.25,
    total_s=0.5,
)
ANSWERED = ReportLine(ROW, Evidence("limited to\nEUR 2,500,000", 2, 41, 65))
NO_ANSWER = {"document_id": None, "answer": None, "finish": None, "first_token_s": None, "total_s": None}
LINES = [
    ANSWERED,
    ReportLine(
        replace(ROW, question_id="q2", title='"Cap", or\nlimit', answer='He said "never",\r\nthen: 永不 🖋'), None
    ),
    ReportLine(replace(ROW, question_id="q3", answer="", output_tokens=0), None),
    ReportLine(replace(ROW, state="unreadable", error_code="empty_document", error="a.txt; b", **NO_ANSWER), None),
]


def as_cell(value: object) -> str:
    return "" if value is None else str(value)


def test_the_csv_gives_back_every_cell_whatever_it_holds() -> None:
    file = io.StringIO(newline="")

    write_csv(LINES, file)

    rows = list(csv.DictReader(io.StringIO(file.getvalue(), newline="")))
    assert rows == [{name: as_cell(value) for name, value in line.record().items()} for line in LINES]


def test_the_jsonl_holds_one_object_a_line() -> None:
    file = io.StringIO(newline="")

    write_jsonl(LINES, file)

    assert [json.loads(line) for line in file.getvalue().split("\n")[:-1]] == [line.record() for line in LINES]
    assert "永不" in file.getvalue()


def test_the_files_read_as_utf_8_in_programs_and_in_spreadsheets(tmp_path: Path) -> None:
    table, objects = write_files(LINES, tmp_path / "not yet" / "there")

    assert (table.name, objects.name) == ("answers.csv", "answers.jsonl")
    assert table.read_bytes().startswith(b"\xef\xbb\xbfdocument,")
    with table.open(encoding="utf-8-sig", newline="") as file:
        assert [row["answer"] for row in csv.DictReader(file)] == [as_cell(line.row.answer) for line in LINES]
    assert objects.read_bytes().decode().count("\n") == len(LINES)
    assert json.loads(objects.read_bytes().split(b"\n")[0])["page"] == 2


def test_a_report_that_fails_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_files(LINES, tmp_path)
    before = [path.read_bytes() for path in paths]

    class Failing(ReportLine):
        def record(self) -> dict[str, object]:
            raise MemoryError

    with pytest.raises(MemoryError):
        write_files([ANSWERED, Failing(ROW, None)], tmp_path)

    assert [path.read_bytes() for path in paths] == before


def test_a_report_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_files(LINES, tmp_path)

    table, objects = write_files([ANSWERED], tmp_path)

    assert len(objects.read_text().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {table.name, objects.name}
