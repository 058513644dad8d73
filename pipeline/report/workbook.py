"""Sheets of a workbook that take any text and any number of rows."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xlsxwriter import Workbook
from xlsxwriter.format import Format
from xlsxwriter.utility import xl_rowcol_to_cell
from xlsxwriter.worksheet import Worksheet

from pipeline.report.sink import CONTROL, without_controls

MOST_CHARS = 32_767  # of a cell, in UTF-16 units
MOST_ROWS = 1_048_576
MOST_COLUMNS = 16_384
_ODD = re.compile(rf"^[=+\-@\t\r＝＋－＠]|{CONTROL.pattern}")

Look = tuple[tuple[str, Any], ...]  # properties of a cell's format; later ones win
_TYPED: Look = (("quote_prefix", True),)
PLAIN: Look = ()


def look(**properties: Any) -> Look:
    return tuple(properties.items())


class Book:
    """A workbook whose rows go to disk as they are written. Sheets may be filled in turn, each from top to bottom."""

    def __init__(self, path: Path) -> None:
        self._folder = TemporaryDirectory(prefix="platemaker-")
        self._book = Workbook(str(path), {"constant_memory": True, "tmpdir": self._folder.name})
        self._formats: dict[Look, Format] = {}
        self._long: Worksheet | None = None
        self._long_rows = 0

    def sheet(self, name: str) -> Worksheet:
        return self._book.add_worksheet(name)

    def format(self, style: Look) -> Format:
        if style not in self._formats:
            self._formats[style] = self._book.add_format({"valign": "top", **dict(style)})
        return self._formats[style]

    def write_text(self, sheet: Worksheet, row: int, column: int, text: str, style: Look) -> None:
        """A text cell, never a formula, whatever it begins with. What is too long is cut, and kept whole elsewhere."""
        if len(text) > MOST_CHARS // 2 or _ODD.search(text):
            text = without_controls(text)
            if _ODD.match(text):
                style += _TYPED  # stays text also when a person edits the cell
            if _units(text) > MOST_CHARS:
                text = self._shortened(text, f"{sheet.get_name()}!{xl_rowcol_to_cell(row, column)}")
        if text:
            sheet.write_string(row, column, text, self.format(style))
        else:
            sheet.write_blank(row, column, None, self.format(style))

    def _shortened(self, text: str, place: str) -> str:
        if self._long is None:
            self._long = self.sheet("Long texts")
            self._long.set_column(0, 0, 20)
            self._long.set_column(1, 8, 80)
            self._long.write_row(0, 0, ["Sheet and cell", "The whole text, in pieces"], self.format(look(bold=True)))
        self._long_rows += 1
        self._long.write_string(self._long_rows, 0, place)
        column, start = 1, 0
        while start < len(text):
            piece = _head(text[start : start + MOST_CHARS], MOST_CHARS)
            self._long.write_string(self._long_rows, column, piece)
            start += len(piece)
            column += 1
        mark = f" … [cut; whole in row {self._long_rows + 1} of sheet Long texts]"
        return _head(text, MOST_CHARS - len(mark)) + mark

    def close(self) -> None:
        """Writes the workbook."""
        self._book.close()

    def discard(self) -> None:
        """Lets go of temporary files; safe after `close` and in the middle."""
        for sheet in self._book.worksheets():
            sheet._opt_close()  # the library has no other way to leave a workbook unwritten
        self._folder.cleanup()


def _units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def _head(text: str, most_units: int) -> str:
    """The longest beginning of at most so many UTF-16 units that parts no character."""
    return text.encode("utf-16-le")[: 2 * most_units].decode("utf-16-le", "ignore")
