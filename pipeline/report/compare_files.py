"""A comparison of two jobs as a file or on the screen."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.errors import UnknownFormat
from pipeline.report.cells import Cell
from pipeline.report.compare import Change, Comparison, Kind
from pipeline.report.sink import fresh_path
from pipeline.report.text_sinks import csv_cell, open_text

ENDINGS = (".xlsx", ".csv", ".jsonl")
LONGEST = 300  # characters of an answer on the screen
_COLOURS = {Kind.ANSWER: "yellow", Kind.STATUS: "magenta", Kind.ADDED: "green", Kind.REMOVED: "red", Kind.SAME: "dim"}
_FILLS = {Kind.ANSWER: "#FFF3C4", Kind.STATUS: "#F3E8FF", Kind.ADDED: "#E3F9E5", Kind.REMOVED: "#FDE8E8"}
_COLUMNS = (("Document", 34), ("Question", 28), ("Change", 16), ("Before", 50), ("After", 50))


def write_comparison(comparison: Comparison, path: Path, *, same: bool) -> None:
    """Writes what changed, and what is the `same` too where asked for.

    Raises:
        UnknownFormat: comparisons are not written with this ending.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UnknownFormat(path, list(ENDINGS))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = fresh_path(path)
    changes = (change for change in comparison.changes() if same or change.kind != Kind.SAME)
    try:
        if path.suffix.lower() == ".xlsx":
            _write_xlsx(changes, fresh)
        else:
            _write_text(changes, fresh, as_csv=path.suffix.lower() == ".csv")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _write_text(changes: Iterator[Change], path: Path, *, as_csv: bool) -> None:
    with open_text(path, bom=as_csv) as file:
        writer = csv.writer(file, lineterminator="\n")
        if as_csv:
            writer.writerow(Change(Kind.SAME, "", "", "", None, None).record())
        for change in changes:
            if as_csv:
                writer.writerow([csv_cell(value) for value in change.record().values()])
            else:
                file.write(json.dumps(change.record(), ensure_ascii=False) + "\n")


def _write_xlsx(changes: Iterator[Change], path: Path) -> None:
    from pipeline.report.workbook import MOST_ROWS, PLAIN, Book, look

    head = look(bold=True, font_color="#FFFFFF", bg_color="#243B53", valign="vcenter")
    text = look(text_wrap=True)
    book = Book(path)
    try:
        sheet = book.sheet("Changes")
        sheet.freeze_panes(1, 1)
        sheet.set_row(0, 24)
        for column, (name, width) in enumerate(_COLUMNS):
            sheet.set_column(column, column, width)
            sheet.write_string(0, column, name, book.format(head))
        row = 0
        for row, change in enumerate(changes, 1):
            if row == MOST_ROWS:
                break
            fill = look(bg_color=_FILLS[change.kind]) if change.kind in _FILLS else PLAIN
            for column, cell in enumerate(_cells(change)):
                book.write_text(sheet, row, column, cell, text + (fill if column == 2 else PLAIN))
        sheet.autofilter(0, 0, min(row, MOST_ROWS - 1), len(_COLUMNS) - 1)
        book.close()
    finally:
        book.discard()


def _cells(change: Change) -> tuple[str, ...]:
    document = f"{change.document} (text changed)" if change.text_changed else change.document
    return document, change.title, change.kind.value, _shown(change.before), _shown(change.after)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "—"
    if cell.merged and len(cell.merged.values) > 1:
        return cell.shown  # has its pages
    return f"{cell.shown} (p. {', '.join(map(str, cell.pages))})" if cell.pages else cell.shown


def print_comparison(console: Console, comparison: Comparison, *, same: bool, most_rows: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, expand=console.is_terminal, show_edge=False)
    for name, ratio in (("Document", 4), ("Question", 4), ("Change", 3), ("Before", 6), ("After", 6)):
        table.add_column(name, ratio=ratio, overflow="fold")
    left_out, last = 0, ""
    gone_or_new = {pair.name for pair in comparison.pairs if pair.before is None or pair.after is None}
    for change in comparison.changes():
        if change.kind == Kind.SAME and not same:
            continue
        one_sided = change.kind in (Kind.ADDED, Kind.REMOVED) and change.document in gone_or_new
        if one_sided and change.document == last:
            continue  # the whole document is one row
        if table.row_count == most_rows:
            left_out += 1
            continue
        document, title, kind, before, after = _cells(change)
        if one_sided:
            title, before, after = "(all)", "", ""
        table.add_row(
            Text(document if change.document != last else ""),
            Text(title),
            Text(kind, style=_COLOURS[change.kind]),
            *(Text(text if len(text) <= LONGEST else text[:LONGEST] + "…") for text in (before, after)),
        )
        last = change.document
    if table.row_count:
        console.print(table)
    if left_out:
        console.print(f"… and {left_out:,} more; write them to a file with -o changes.xlsx.", style="dim")
    _print_counts(console, comparison)


def _print_counts(console: Console, comparison: Comparison) -> None:
    found, counts = comparison.record(), comparison.counts
    parts = [f"{counts[kind]:,} {kind.value}" for kind in Kind if counts[kind]]
    console.print(f"Answers: {', '.join(parts) or 'none'}", highlight=False)
    for name, what in (
        ("documents_added", "Documents added"),
        ("documents_removed", "Documents removed"),
        ("documents_changed", "Documents with another text"),
        ("questions_added", "Questions added"),
        ("questions_removed", "Questions removed"),
    ):
        if found[name]:
            more = f" and {len(found[name]) - 10:,} more" if len(found[name]) > 10 else ""
            names = ", ".join(found[name][:10])
            console.print(f"{what}: {names}{more}", highlight=False, markup=False, soft_wrap=True)
