import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import UnknownFormat
from pipeline.report import files
from pipeline.report.files import stream_report, write_reports
from pipeline.report.formats import Format, out_files
from pipeline.report.rows import lines_in_text, report_lines
from pipeline.report.text_sinks import CsvSink, JsonlSink, guarded
from tests.pipeline.report.nights import TENANT, Night


def written(night: Night, job_id: str, path: Path, **options: bool) -> Path:
    write_reports(night.database, night.store, TENANT, job_id, [path], **options)
    return path


def test_every_row_in_is_a_row_out_in_order_also_of_a_job_that_is_half_done(
    night: Night, job_id: str, tmp_path: Path
) -> None:
    table = written(night, job_id, tmp_path / "a.csv")
    objects = written(night, job_id, tmp_path / "a.jsonl")

    with table.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    records = [json.loads(line) for line in objects.read_text().splitlines()]
    asked = [question.question_id for question in night.questions]
    expected = [(name, one) for name in ("in/alpha.pdf", "in/scan.pdf", "in/beta.docx", "w.txt") for one in asked]
    assert [(row["document"], row["question_id"]) for row in rows] == expected
    assert [(record["document"], record["question_id"]) for record in records] == expected
    assert [record["status"] for record in records[8:16]] == ["error"] * 8
    assert [record["status"] for record in records[24:]] == ["pending"] * 8


def test_values_are_in_their_type_and_doubts_are_told(night: Night, job_id: str) -> None:
    found = {
        (line.document, line.row.question_id): line.cell
        for line in report_lines(night.database, night.store, TENANT, job_id)
    }

    values = {one: cell.value for (name, one), cell in found.items() if name == "alpha.pdf"}
    assert values["cap"] == {"amount": "2500000", "currency": "EUR"}
    assert (values["date"], values["assign"], values["kind"]) == ("2026-11-30", False, "non-exclusive")
    assert values["parties"][1] == "Müller & Söhne"
    beta = {one: (cell.status, cell.doubt) for (name, one), cell in found.items() if name == "beta.docx"}
    assert beta["law"] == ("answered", "no quote")
    assert beta["cap"] == ("answered", "no single amount of money in these words; no quote")
    assert beta["assign"] == ("answered", "no yes or no in these words")
    assert beta["date"] == beta["pay"] == ("not_found", None)
    assert beta["parties"] == ("error", None)


def test_a_quote_stands_in_the_document_at_its_offsets(night: Night, job_id: str) -> None:
    for found in lines_in_text(night.database, night.store, TENANT, job_id):
        cell = found.line.cell
        assert cell.verified == (cell.quote is not None)
        if cell.quote is not None:
            assert found.text is not None
            assert found.text[cell.start : cell.stop] == cell.quote


def test_the_jsonl_holds_what_the_model_said_uncut(night: Night, job_id: str, tmp_path: Path) -> None:
    records = [json.loads(line) for line in written(night, job_id, tmp_path / "a.jsonl").read_text().splitlines()]

    assert records[23]["answer"] == "@SUM(A1)\t" * 5000 + "\x07end"


def test_logprobs_are_in_the_jsonl_alone_and_only_where_asked_for(night: Night, job_id: str) -> None:
    logprobs = [{"id": 7, "text": "EUR", "logprob": -0.5, "top": []}]
    first, second, *_ = lines_in_text(night.database, night.store, TENANT, job_id)
    asked = replace(first.line, row=replace(first.line.row, logprobs=logprobs))
    table, objects = io.StringIO(), io.StringIO()

    for sink in (CsvSink(table), JsonlSink(objects)):
        sink.add(second)
        sink.add(first._replace(line=asked))

    assert "logprob" not in table.getvalue()
    plain, with_them = (json.loads(line) for line in objects.getvalue().splitlines())
    assert "logprobs" not in plain
    assert with_them["logprobs"] == logprobs


@pytest.mark.parametrize("text", ["=1+1", "+x", "-x", "@x", "\tx", "\rx", "\nx", "＝1", "'=1", "''@x"])
def test_a_csv_cell_that_a_spreadsheet_would_compute_begins_with_an_apostrophe(text: str) -> None:
    assert guarded(text) == "'" + text


@pytest.mark.parametrize("text", ["", "x=1", "-5", "-5.00", "+1,000.50", "'tis", "-12%", "'"])
def test_other_csv_cells_stay_as_they_are(text: str) -> None:
    assert guarded(text) == text


@given(st.text(alphabet="'=+-@\t\r\n＝x15", max_size=6))
def test_guarding_can_be_undone(text: str) -> None:
    cell = guarded(text)

    assert (cell[1:] if re.match(r"'+[=+\-@\t\r\n＝＋－＠]", cell) else cell) == text


def test_a_byte_order_mark_is_written_unless_it_is_refused(night: Night, job_id: str, tmp_path: Path) -> None:
    assert written(night, job_id, tmp_path / "a.csv").read_bytes().startswith(b"\xef\xbb\xbfdocument,")
    assert written(night, job_id, tmp_path / "b.csv", bom=False).read_bytes().startswith(b"document,")
    assert written(night, job_id, tmp_path / "a.jsonl").read_bytes().startswith(b"{")


def test_markdown_keeps_its_tables_whatever_answers_hold(night: Night, job_id: str) -> None:
    file = io.StringIO()

    stream_report(night.database, night.store, TENANT, job_id, Format.MD, file)

    rows = [line for line in file.getvalue().splitlines() if line.startswith("|")]
    assert len(rows) == 4 * (2 + len(night.questions))
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}
    assert "<" not in file.getvalue()


def test_a_report_that_fails_leaves_the_old_one_and_nothing_else(
    night: Night, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"out/a.{ending}" for ending in Format]
    write_reports(night.database, night.store, TENANT, job_id, paths)
    before = [path.read_bytes() for path in paths]

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(files, "summary_of", fail)
    with pytest.raises(MemoryError):
        write_reports(night.database, night.store, TENANT, job_id, paths)

    assert [path.read_bytes() for path in paths] == before
    assert sorted((tmp_path / "out").iterdir()) == sorted(paths)


def test_out_is_a_file_of_a_known_ending_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "v1.2").mkdir()

    assert out_files(tmp_path / "review.xlsx") == [tmp_path / "review.xlsx"]
    assert [path.suffix for path in out_files(tmp_path / "review")] == [".xlsx", ".html", ".csv", ".jsonl"]
    assert len(out_files(tmp_path / "v1.2")) == 4
    with pytest.raises(UnknownFormat, match=r"review\.pdf has none of the endings of reports; use \.xlsx"):
        out_files(tmp_path / "review.pdf")
