from datetime import datetime
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import openpyxl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.report.files import write_reports
from pipeline.report.workbook import MOST_CHARS, PLAIN, Book
from tests.pipeline.report.nights import ANSWERS, HOSTILE, TENANT, Night


@pytest.fixture
def book(night: Night, job_id: str, tmp_path: Path) -> Any:
    path = tmp_path / "a.xlsx"
    write_reports(night.database, night.store, TENANT, job_id, [path])
    return openpyxl.load_workbook(path)


def test_a_contract_is_a_row_and_a_question_a_column_in_their_order(night: Night, book: Any) -> None:
    grid = book["Answers"]

    assert [cell.value for cell in grid[1]] == ["Document", *(question.title for question in night.questions)]
    assert [grid.cell(row, 1).value for row in range(2, 6)] == ["alpha.pdf", "scan.pdf", "beta.docx", "w.txt"]
    assert grid.max_row == 5
    assert grid.freeze_panes == "B2"
    assert grid.auto_filter.ref == "A1:I5"


def test_cells_hold_values_of_their_type(book: Any) -> None:
    row = [cell.value for cell in book["Answers"][2]][1:]

    assert row[0] == ANSWERS["law"]
    assert row[1] == 2_500_000 and book["Answers"]["C2"].number_format == '"EUR" #,##0'
    assert row[2] == datetime(2026, 11, 30) and book["Answers"]["D2"].number_format == "yyyy-mm-dd"
    assert row[3:5] == ["No", "non-exclusive"]
    assert row[5] == f"Acme {HOSTILE} GmbH; Müller & Söhne"


def test_nothing_is_a_formula(book: Any) -> None:
    cells = [cell for sheet in book for row in sheet.iter_rows() for cell in row]

    assert not [cell.coordinate for cell in cells if cell.data_type == "f"]
    grid = book["Answers"]
    assert (grid["I1"].value, grid["I2"].value) == ("=HYPERLINK(1)", "=1+1")
    assert grid["I2"].quotePrefix and not grid["B2"].quotePrefix


def test_the_evidence_has_a_row_an_answer_with_quote_and_page(night: Night, book: Any) -> None:
    sheet = book["Evidence"]
    names = [cell.value for cell in sheet[1]]
    rows = [dict(zip(names, (cell.value for cell in row), strict=True)) for row in sheet.iter_rows(min_row=2)]

    assert len(rows) == 4 * len(night.questions)
    assert rows[1]["Quote"] == "limited to EUR 2,500,000 🖋 in each Contract Year"
    assert (rows[1]["Page"], rows[1]["Verified"], rows[1]["Value"]) == (2, "yes", 2_500_000)
    assert rows[16]["To look at"] == "no quote"
    assert "Page 2: “limited to EUR" in book["Answers"]["C2"].comment.text


def test_what_is_too_long_for_a_cell_is_whole_on_another_sheet(book: Any) -> None:
    cut, whole = book["Answers"]["I4"].value, book["Long texts"]
    places = {whole.cell(row, 1).value: row for row in range(2, whole.max_row + 1)}

    row = places["Answers!I4"]
    pieces = [cell.value for cell in whole[row][1:] if cell.value]
    assert "".join(pieces) == "@SUM(A1)\t" * 5000 + "\ufffdend"
    assert len(cut) <= MOST_CHARS
    assert cut.endswith(f"[cut; whole in row {row} of sheet Long texts]")
    assert "Evidence!D25" in places


def test_the_summary_counts_answers_and_names_failures(book: Any) -> None:
    pairs = {row[0].value: row[1].value for row in book["Summary"].iter_rows(max_col=2) if row[0].value}

    assert book.sheetnames[0] == "Summary"
    assert pairs["Documents × questions"] == 32
    assert (pairs["Answered"], pairs["Not found in the document"]) == (13, 2)
    assert (pairs["With an error"], pairs["Waiting"], pairs["Cancelled"]) == (9, 8, 0)
    assert pairs["To look at: no quote, or no value of the type"] == 3
    assert pairs["scan.pdf"] == "scan.pdf looks scanned; run OCR over it first."
    assert pairs["beta.docx — Parties"] == "It did not fit."
    assert pairs["Finished"] == "not yet: this is what is there so far"


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(st.text(max_size=40), st.sampled_from(["🖋" * 20_000, "_x0041_", "=A1", "\ud800", "\x0b", "\ufffe"])),
        min_size=1,
    )
)
def test_any_text_gives_a_workbook_that_can_be_read(tmp_path: Path, texts: list[str]) -> None:
    book = Book(tmp_path / "a.xlsx")
    sheet = book.sheet("S")
    for row, text in enumerate(texts):
        book.write_text(sheet, row, 0, text, PLAIN)
    book.close()
    book.discard()

    read = openpyxl.load_workbook(tmp_path / "a.xlsx")["S"]

    for row, text in enumerate(texts, 1):
        cell = read.cell(row, 1)
        assert cell.data_type in ("s", "n", "inlineStr") and (cell.data_type != "n" or cell.value is None)
        if text.isprintable() and len(text) < 100 and "_x" not in text:
            assert (cell.value or "") == text


def test_a_workbook_left_unwritten_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    book = Book(tmp_path / "a.xlsx")
    book.write_text(book.sheet("S"), 0, 0, "x", PLAIN)

    book.discard()

    assert not list(tmp_path.iterdir())


def test_many_answers_have_no_comments(
    night: Night, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.report.xlsx_sink.MOST_COMMENTS", 31)

    write_reports(night.database, night.store, TENANT, job_id, [tmp_path / "a.xlsx"])

    with ZipFile(tmp_path / "a.xlsx") as archive:
        assert not [name for name in archive.namelist() if "comment" in name]


def test_a_full_sheet_goes_on_on_another(
    night: Night, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.report.xlsx_sink.MOST_ROWS", 11)

    write_reports(night.database, night.store, TENANT, job_id, [tmp_path / "a.xlsx"])

    book = openpyxl.load_workbook(tmp_path / "a.xlsx")
    sheets = [book[name] for name in book.sheetnames if name.startswith("Evidence")]
    assert [sheet.max_row - 1 for sheet in sheets] == [10, 10, 10, 2]
    assert [row[0].value for sheet in sheets for row in sheet.iter_rows(min_row=2)] == [
        name for name in ("alpha.pdf", "scan.pdf", "beta.docx", "w.txt") for _ in night.questions
    ]
