"""The review sheet: a row a contract, a column a question; a row an answer with its quote; a summary."""

from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

from xlsxwriter.worksheet import Worksheet

from pipeline.playbooks.answer_types import AnswerSpec, AnswerType
from pipeline.report.cells import Cell, CellStatus
from pipeline.report.rows import LineInText, ReportLine
from pipeline.report.sink import Heading, without_controls
from pipeline.report.summary import Summary, Tally
from pipeline.report.workbook import MOST_COLUMNS, MOST_ROWS, PLAIN, Book, Look, look

MOST_COMMENTS = 2_000  # spreadsheet programs open slowly with more; the sheet Evidence says the same
MOST_FAILURES = 10_000
_INK, _GREY, _RULE = "#1F2933", "#7B8794", "#D9DEE4"
_HEAD = look(
    bold=True,
    text_wrap=True,
    valign="vcenter",
    font_color="#FFFFFF",
    bg_color="#243B53",
    border=1,
    border_color="#486581",
)
_TEXT = look(text_wrap=True, font_color=_INK)
_CELL = _TEXT + look(border=1, border_color=_RULE)
_NAME = _CELL + look(bold=True)
_STATUS = {
    CellStatus.ANSWERED: PLAIN,
    CellStatus.NOT_FOUND: look(font_color=_GREY, italic=True, bg_color="#F5F7FA"),
    CellStatus.ERROR: look(font_color="#9B1C1C", bg_color="#FDE8E8"),
    CellStatus.PENDING: look(font_color="#8D5B00", italic=True, bg_color="#FFF8E1"),
}
_DOUBT = look(bg_color="#FFF3C4")
_SECTION = look(bold=True, font_size=12, font_color="#243B53")
_SOFT = look(font_color=_GREY)
_WIDTHS = {AnswerType.YES_NO: 14, AnswerType.DATE: 14, AnswerType.MONEY: 18, AnswerType.CHOICE: 18}
_EVIDENCE = (
    ("Document", 34), ("Question", 26), ("Status", 12), ("Answer", 50), ("Value", 22), ("Page", 7), ("Quote", 70),
    ("Verified", 9), ("To look at", 24), ("Carried over", 12), ("Merged", 26),
)  # fmt: skip


class XlsxSink:
    """Lines go to disk as they come: memory does not grow with them."""

    def __init__(self, path: Path, heading: Heading) -> None:
        self._heading = heading
        self._book = Book(path)
        self._comments = heading.job.rows <= MOST_COMMENTS
        self._summary = self._book.sheet("Summary")
        self._columns = min(len(heading.questions), MOST_COLUMNS - 1)
        self._grid = _Pages(self._book, "Answers", self._start_grid)
        self._evidence = _Pages(self._book, "Evidence", self._start_evidence)
        self._source: int | None = None
        self._failures: list[tuple[str, str]] = []
        self._more_failures = 0

    def _start_grid(self, sheet: Worksheet) -> None:
        head = self._book.format(_HEAD)
        sheet.freeze_panes(1, 1)
        sheet.set_row(0, 48)
        sheet.set_default_row(45)
        sheet.set_column(0, 0, 36)
        sheet.write_string(0, 0, "Document", head)
        for number, question in enumerate(self._heading.questions[: self._columns]):
            answer_type = AnswerSpec.of(question.spec).type
            sheet.set_column(number + 1, number + 1, _WIDTHS.get(answer_type, 32))
            self._book.write_text(sheet, 0, number + 1, question.title, _HEAD)
            if self._comments:
                _comment(sheet, 0, number + 1, self._heading.asked(number))
        sheet.set_landscape()
        sheet.repeat_rows(0)
        sheet.repeat_columns(0)

    def _start_evidence(self, sheet: Worksheet) -> None:
        sheet.freeze_panes(1, 2)
        sheet.set_row(0, 24)
        sheet.set_default_row(30)
        for column, (name, width) in enumerate(_EVIDENCE):
            sheet.set_column(column, column, width)
            sheet.write_string(0, column, name, self._book.format(_HEAD))
        sheet.set_landscape()
        sheet.fit_to_pages(1, 0)
        sheet.repeat_rows(0)

    def add(self, found: LineInText) -> None:
        line = found.line
        first = line.row.source_position != self._source
        if first:
            self._source = line.row.source_position
            sheet, row = self._grid.next_row()
            self._book.write_text(sheet, row, 0, line.document, _NAME)
        sheet, row = self._grid.current()
        column = line.row.question_position + 1
        if column <= self._columns:
            self._write_value(sheet, row, column, line.cell)
            if self._comments and line.cell.quote:
                _comment(sheet, row, column, _quoted(line.cell))
        self._add_evidence(line)
        if line.cell.status == CellStatus.ERROR and (first or line.row.state != "unreadable"):
            self._note_failure(line)

    def _note_failure(self, line: ReportLine) -> None:
        where = line.document if line.row.state == "unreadable" else f"{line.document} — {line.row.title}"
        if len(self._failures) < MOST_FAILURES:
            self._failures.append((where, line.cell.text))
        else:
            self._more_failures += 1

    def _write_value(self, sheet: Worksheet, row: int, column: int, cell: Cell, *, bare: bool = False) -> None:
        base = (_TEXT if bare else _CELL) + _STATUS[cell.status] + (_DOUBT if cell.doubt else PLAIN)
        if cell.parsed and cell.type == AnswerType.DATE and cell.value >= "1900-03-01":  # the first day Excel has right
            day = self._book.format(base + look(num_format="yyyy-mm-dd", align="left"))
            sheet.write_datetime(row, column, date.fromisoformat(cell.value), day)
        elif cell.parsed and cell.type == AnswerType.MONEY and len(cell.value["amount"]) <= 15:
            currency = f'"{cell.value["currency"]}" ' if cell.value["currency"] else ""
            cents = ".00" if "." in cell.value["amount"] else ""
            money = self._book.format(base + look(num_format=f"{currency}#,##0{cents}", align="left"))
            sheet.write_number(row, column, float(cell.value["amount"]), money)
        else:
            self._book.write_text(sheet, row, column, cell.shown, base)

    def _add_evidence(self, line: ReportLine) -> None:
        cell = line.cell
        sheet, row = self._evidence.next_row()
        status = _TEXT + _STATUS[cell.status]
        write = self._book.write_text
        write(sheet, row, 0, line.document, _TEXT)
        write(sheet, row, 1, line.row.title, _TEXT)
        write(sheet, row, 2, cell.status.replace("_", " "), status)
        write(sheet, row, 3, cell.text, status)
        if cell.parsed and cell.type != AnswerType.TEXT:
            self._write_value(sheet, row, 4, cell, bare=True)
        if len(cell.pages) > 1:
            write(sheet, row, 5, ", ".join(map(str, cell.pages)), _TEXT)
        elif cell.page is not None:
            sheet.write_number(row, 5, cell.page, self._book.format(_TEXT))
        if cell.quote:
            write(sheet, row, 6, cell.quote if len(cell.quotes) == 1 else _quoted(cell), _TEXT)
        if cell.status == CellStatus.ANSWERED:
            write(sheet, row, 7, "yes" if cell.verified else "no", _TEXT)
        if cell.doubt:
            write(sheet, row, 8, cell.doubt, _TEXT + _DOUBT)
        if line.row.carried_from is not None:
            write(sheet, row, 9, "yes", _TEXT)
        if cell.merged:
            write(sheet, row, 10, cell.merged.note.removeprefix("merged: "), _TEXT)

    def finish(self, summary: Summary, tally: Tally) -> None:
        self._grid.finish(self._columns)
        self._evidence.finish(len(_EVIDENCE) - 1)
        _SummarySheet(self._book, self._summary).write(
            self._heading, summary, tally, self._failures, self._more_failures
        )
        self._summary.activate()
        self._book.close()

    def close(self) -> None:
        self._book.discard()


class _Pages:
    """A table that goes on on another sheet when one is full."""

    def __init__(self, book: Book, name: str, start: Callable[[Worksheet], None]) -> None:
        self._book, self._name, self._start = book, name, start
        self._sheets: list[tuple[Worksheet, int]] = []
        self._add()

    def _add(self) -> None:
        number = len(self._sheets) + 1
        sheet = self._book.sheet(self._name if number == 1 else f"{self._name} {number}")
        self._start(sheet)
        self._sheets.append((sheet, 0))

    def current(self) -> tuple[Worksheet, int]:
        return self._sheets[-1]

    def next_row(self) -> tuple[Worksheet, int]:
        if self._sheets[-1][1] == MOST_ROWS - 1:
            self._add()
        sheet, row = self._sheets[-1]
        self._sheets[-1] = sheet, row + 1
        return self._sheets[-1]

    def finish(self, last_column: int) -> None:
        for sheet, last_row in self._sheets:
            sheet.autofilter(0, 0, last_row, last_column)


class _SummarySheet:
    def __init__(self, book: Book, sheet: Worksheet) -> None:
        self._book, self._sheet, self._row = book, sheet, 0

    def write(
        self, heading: Heading, summary: Summary, tally: Tally, failures: list[tuple[str, str]], more_failures: int
    ) -> None:
        sheet = self._sheet
        sheet.hide_gridlines(2)
        sheet.set_landscape()
        sheet.fit_to_pages(1, 0)
        sheet.set_column(0, 0, 46)
        sheet.set_column(1, 1, 60)
        sheet.set_column(2, 7, 12)
        self._text(0, heading.title, look(bold=True, font_size=16, font_color="#243B53"), height=26)
        self._row += 1
        finished = heading.job.finished_at
        plain: list[tuple[str, str | int | float | None]] = [
            ("Job", summary.job_id),
            ("Model", heading.job.model),
            ("Submitted", f"{heading.job.created_at:%Y-%m-%d %H:%M} UTC"),
            ("Finished", f"{finished:%Y-%m-%d %H:%M} UTC" if finished else "not yet: this is what is there so far"),
            ("Documents", heading.sources),
            ("Questions", len(heading.questions)),
        ]
        self._table(plain)
        self._section("Answers")
        self._table(
            [
                ("Documents × questions", summary.rows),
                ("Answered", summary.answered - summary.not_found),
                ("Not found in the document", summary.not_found),
                ("With an error", summary.failed),
                ("Waiting", summary.pending),
                ("Cancelled", summary.cancelled),
                ("Not answered in time", summary.expired),
                ("To look at: no quote, or no value of the type", summary.doubtful),
            ]
        )
        self._section("Costs")
        self._table(
            [
                ("Tokens read", summary.tokens_read),
                ("Tokens taken from snapshots", summary.tokens_reused),
                ("Tokens without sharing", summary.tokens_without_sharing),
                ("Answer tokens", summary.output_tokens),
                ("Reading, seconds", round(summary.prefill_s, 1)),
                ("Answering, seconds", round(summary.decode_s, 1)),
                ("Snapshots, MB", round(summary.snapshot_bytes / 1e6, 1)),
                ("Devices, seconds", round(summary.device_s, 1)),
            ]
        )
        if summary.cost is not None:
            self._money("Cost", summary.cost)
        if summary.cost_reading_every_time is not None:
            self._money("Cost, had every question read its document", summary.cost_reading_every_time)
        self._questions(heading, tally)
        self._failures(failures, more_failures)

    def _money(self, name: str, value: float) -> None:
        self._text(0, name, _SOFT)
        self._sheet.write_number(self._row, 1, value, self._book.format(look(num_format="#,##0.0000", align="left")))
        self._row += 1

    def _questions(self, heading: Heading, tally: Tally) -> None:
        self._section("Questions")
        names = ("Question", "Asked", "Type", *(status.replace("_", " ") for status in CellStatus))
        self._head(names)
        for number, question in enumerate(heading.questions):
            self._text(0, question.title, _CELL, height=30)
            self._text(1, heading.asked(number), _CELL)
            self._text(2, AnswerSpec.of(question.spec).type.replace("_", "/"), _CELL)
            for column, status in enumerate(CellStatus, 3):
                self._sheet.write_number(self._row, column, tally.cells[number, status], self._book.format(_CELL))
            self._row += 1

    def _failures(self, failures: list[tuple[str, str]], more: int) -> None:
        self._section("Failures")
        if not failures:
            self._text(0, "None.", _SOFT)
            return
        for reason, count in Counter(reason for _, reason in failures).most_common(5):
            if count > 1:
                self._text(0, f"{count:,} times", look(bold=True))
                self._text(1, reason, look(text_wrap=True))
                self._row += 1
        self._head(("Where", "Why"))
        for where, why in failures:
            self._text(0, where, _CELL, height=15 * (1 + max(len(where) // 44, len(why) // 58)))
            self._text(1, why, _CELL)
            self._row += 1
        if more:
            self._text(0, f"… and {more:,} more, on sheet Evidence", look(italic=True))

    def _section(self, name: str) -> None:
        self._row += 1
        self._text(0, name, _SECTION, height=20)
        self._row += 1

    def _head(self, names: tuple[str, ...]) -> None:
        for column, name in enumerate(names):
            self._text(column, name, _HEAD, height=22)
        self._row += 1

    def _table(self, pairs: list[tuple[str, str | int | float | None]]) -> None:
        for name, value in pairs:
            self._text(0, name, _SOFT)
            if isinstance(value, str):
                self._text(1, value, PLAIN)
            elif value is not None:
                number = look(num_format="#,##0.0" if isinstance(value, float) else "#,##0", align="left")
                self._sheet.write_number(self._row, 1, value, self._book.format(number))
            self._row += 1

    def _text(self, column: int, text: str, style: Look, *, height: int | None = None) -> None:
        if height:
            self._sheet.set_row(self._row, height)
        self._book.write_text(self._sheet, self._row, column, text, style)


def _quoted(cell: Cell) -> str:
    return "\n".join(f"Page {quote.page}: “{quote.quote}”" for quote in cell.quotes)


def _comment(sheet: Worksheet, row: int, column: int, text: str) -> None:
    text = without_controls(text)
    text = text if len(text) <= 500 else text[:500].rstrip() + "…"
    lines = len(text) / 42 + text.count("\n") + 1.5
    sheet.write_comment(
        row, column, text, {"author": "Platemaker", "x_scale": 2, "height": min(300, 16 * lines), "font_size": 9}
    )
