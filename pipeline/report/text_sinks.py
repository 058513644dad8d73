"""CSV, JSONL and Markdown."""

import csv
import json
import re
from pathlib import Path
from typing import IO, Any

from pipeline.report.cells import CellStatus, show_value
from pipeline.report.rows import LineInText, ReportLine
from pipeline.report.sink import Heading
from pipeline.report.summary import Summary, Tally

# What a spreadsheet would compute (OWASP, "CSV Injection"), also behind apostrophes, so that guarding can be undone
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)*%?")


def guarded(text: str) -> str:
    """The cell with an apostrophe before it where a spreadsheet program would take it for a formula.

    Plain numbers such as -5.00 stay. To undo: drop one apostrophe from cells of apostrophes and one of = + - @.
    """
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def csv_cell(value: Any) -> str:
    return "" if value is None else guarded(value) if isinstance(value, str) else str(value)


def csv_record(line: ReportLine) -> dict[str, str]:
    """The line's record in cells; the value as people write it."""
    record, cell = line.record(), line.cell
    record["value"] = show_value(cell.type, cell.value, cell.text) if cell.parsed else None
    return {name: csv_cell(value) for name, value in record.items()}


class CsvSink:
    """One line per row under a line of column names; empty cells where there is nothing to say."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._writer: csv.DictWriter[str] | None = None

    def add(self, found: LineInText) -> None:
        record = csv_record(found.line)
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, fieldnames=list(record), lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerow(record)

    def finish(self, summary: Summary, tally: Tally) -> None:
        self._file.flush()

    def close(self) -> None:
        pass


class JsonlSink:
    """One object a line, everything in it, nothing cut."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def add(self, found: LineInText) -> None:
        text = json.dumps(found.line.json_record(), ensure_ascii=False)
        self._file.write(text.encode("utf-8", "replace").decode() + "\n")

    def finish(self, summary: Summary, tally: Tally) -> None:
        self._file.flush()

    def close(self) -> None:
        pass


class MarkdownSink:
    """A section per document, a table row per question."""

    def __init__(self, file: IO[str], heading: Heading) -> None:
        self._file = file
        self._heading = heading
        self._source: int | None = None
        counts = f"{heading.sources:,} documents × {len(heading.questions):,} questions"
        self._file.write(f"# {_inline(heading.title)}\n\n{counts}, model {_inline(heading.job.model)}\n")

    def add(self, found: LineInText) -> None:
        line, cell = found.line, found.line.cell
        if line.row.source_position != self._source:
            self._source = line.row.source_position
            self._file.write(
                f"\n## {_inline(line.document)}\n\n| Question | Answer | Page | Quote |\n|---|---|---|---|\n"
            )
        answer = _inline(cell.shown)
        if cell.status != CellStatus.ANSWERED:
            answer = f"*{cell.status.replace('_', ' ')}: {answer}*"
        elif cell.doubt:
            answer += f" *({_inline(cell.doubt)})*"
        if cell.merged:
            answer += f" *({_inline(cell.merged.note)})*"
        pages = ", ".join(map(str, cell.pages))
        quotes = " … ".join(quote.quote for quote in cell.quotes)
        self._file.write(f"| {_inline(line.row.title)} | {answer} | {pages} | {_inline(quotes)} |\n")

    def finish(self, summary: Summary, tally: Tally) -> None:
        self._file.write(
            f"\n{summary.answered:,} of {summary.rows:,} answered, {summary.not_found:,} of them not found; "
            f"{summary.failed:,} with an error, {summary.pending:,} waiting, {summary.cancelled:,} cancelled, "
            f"{summary.expired:,} not answered in time.\n"
        )
        self._file.flush()

    def close(self) -> None:
        pass


def _inline(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(text.split()))


def open_text(path: Path, *, bom: bool) -> IO[str]:
    # The mark at the start makes spreadsheet programs read the CSV as UTF-8.
    return path.open("w", encoding="utf-8-sig" if bom else "utf-8", errors="replace", newline="")
