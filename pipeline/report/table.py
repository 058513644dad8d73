"""Answers and the closing summary on the screen."""

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.report.cells import CellStatus
from pipeline.report.rows import ReportLine
from pipeline.report.summary import Summary
from storage.schema import ItemState

MOST_ROWS = 60


def first_lines(kept: list[ReportLine]) -> Callable[[ReportLine], None]:
    """Keeps as many of the lines it is called with as `print_table` shows."""
    return lambda line: kept.append(line) if len(kept) < MOST_ROWS else None


def print_table(
    console: Console, lines: list[ReportLine], *, most_rows: int = MOST_ROWS, rows: int | None = None
) -> None:
    """One row per answer; a file that could not be read takes one row in all. `rows`: how many there are."""
    rows = len(lines) if rows is None else rows
    many = len({line.row.source_position for line in lines}) > 1
    table = Table(box=box.SIMPLE_HEAD, expand=console.is_terminal, show_edge=False)
    if many:
        table.add_column("Document", ratio=3, overflow="fold")
    table.add_column("Question", ratio=4)
    table.add_column("Answer", ratio=8)
    table.add_column("Page", justify="right", no_wrap=True)
    shown: set[int] = set()
    for line in lines[:most_rows]:
        row = line.row
        if row.state == "unreadable":
            if row.source_position in shown:
                continue
            cells: list[str | Text] = ["(all)", Text(row.error or "", style="red"), ""]
        else:
            cells = [row.title, _answer(line), ", ".join(map(str, line.cell.pages))]
        first = row.source_position not in shown
        shown.add(row.source_position)
        table.add_row(*([line.document if first else ""] if many else []), *cells)
    console.print(table)
    if rows > min(most_rows, len(lines)):
        console.print(f"… and {rows - min(most_rows, len(lines)):,} more rows in the files.", style="dim")


def _answer(line: ReportLine) -> Text:
    row, cell = line.row, line.cell
    if row.state != ItemState.ANSWERED:
        text = Text(row.error or (cell.text if cell.merged else row.state), style="red" if row.error else "yellow")
    else:
        text = Text(cell.shown or "(empty)", style="dim italic" if cell.status == CellStatus.NOT_FOUND else "")
    if cell.doubt:
        text.append(f" ({cell.doubt})", style="yellow")
    return text.append(f" ({cell.merged.note})", style="dim") if cell.merged else text


def print_summary(console: Console, summary: Summary, files: tuple[Path, ...]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("Rows", _rows(summary))
    if summary.snapshots_found and not summary.snapshots_made and not summary.read_in_one_piece:
        how = "snapshot found, nothing read again" if summary.snapshots_found == 1 else "snapshots found, nothing read"
        table.add_row("Prefill", f"none: {summary.snapshots_found} {how} ({summary.tokens_reused:,} tokens reused)")
    elif summary.snapshots_made or summary.read_in_one_piece:
        speed = f" ({summary.prefill_tokens_per_s:,.0f} tokens/s)" if summary.prefill_tokens_per_s else ""
        reused = f"; {summary.tokens_reused:,} tokens reused from stored chunks" if summary.tokens_reused else ""
        table.add_row("Prefill", f"{summary.prefill_s:.1f} s{speed}{reused}")
    if summary.tokens_without_sharing:
        table.add_row("Tokens read", f"{summary.tokens_read:,}, once")
        table.add_row("Without sharing", f"{summary.tokens_without_sharing:,} tokens would have been read")
        count = summary.snapshots_found + summary.snapshots_made
        in_one_piece = f"; {summary.read_in_one_piece} read in one piece" if summary.read_in_one_piece else ""
        table.add_row("Snapshots", f"{summary.snapshot_bytes / 1e6:,.1f} MB in {count}{in_one_piece}")
    if summary.decode_tokens_per_s:
        table.add_row(
            "Decode",
            f"{summary.output_tokens:,} tokens in {summary.decode_s:.1f} s, {summary.decode_tokens_per_s:.1f} tokens/s",
        )
    if summary.first_token_s is not None:
        table.add_row("First token", f"{summary.first_token_s:.2f} s after decode took the question up (median)")
    for path in files:
        table.add_row(path.suffix[1:].upper(), str(path))
    table.add_row("Job", summary.job_id)
    console.print(table)


def _rows(summary: Summary) -> str:
    parts = [f"{summary.answered:,} of {summary.rows:,} answered"]
    if summary.not_found:
        parts.append(f"{summary.not_found:,} of them not found")
    if summary.doubtful:
        parts.append(f"{summary.doubtful:,} to look at")
    if summary.failed:
        parts.append(f"{summary.failed:,} with an error")
    if summary.cancelled:
        parts.append(f"{summary.cancelled:,} cancelled")
    if summary.expired:
        parts.append(f"{summary.expired:,} not answered in time")
    return ", ".join(parts)
