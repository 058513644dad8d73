"""Rows of a workbook (XLSX) as text. Imports the library only when there is one to read."""

import zipfile
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path

from pipeline.errors import QuestionFileError

MOST_BYTES = 100 * 2**20  # unpacked; a checklist has some kB
MOST_ROWS = 20_000


def workbook_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows of the first sheet that hold something, with their numbers as the spreadsheet shows them.

    Raises:
        QuestionFileError: it is missing, no workbook, or much too large.
    """
    from openpyxl import load_workbook

    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
                raise QuestionFileError(path, reason=f"it unpacks to more than {MOST_BYTES >> 20} MB")
        book = load_workbook(path, read_only=True, data_only=True)
        try:
            sheet = book.worksheets[0]
            sheet.reset_dimensions()
            for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
                if number > MOST_ROWS:
                    raise QuestionFileError(path, reason=f"it has more than {MOST_ROWS:,} rows")
                cells = [_text(cell) for cell in row]
                if any(cells):
                    yield number, cells
        finally:
            book.close()
    except QuestionFileError:
        raise
    except FileNotFoundError as exc:
        raise QuestionFileError(path, reason="the file does not exist") from exc
    except OSError as exc:
        raise QuestionFileError(path, reason=f"it cannot be read ({exc.strerror or exc})") from exc
    except Exception as exc:  # the library raises whatever a broken part leads it to
        raise QuestionFileError(path, reason="it is not an XLSX workbook, or is damaged") from exc


def _text(cell: object) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, datetime):
        return cell.date().isoformat() if cell.time() == cell.time().min else cell.isoformat(" ")
    return cell.isoformat() if isinstance(cell, date) else str(cell).strip()
