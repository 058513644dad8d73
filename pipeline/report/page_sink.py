"""The review page: one HTML file that needs no network, no server and no other file.

Whatever contracts, questions and answers hold is text in it: escaped in the grid, JSON without `<` beside it, and a
policy that runs only the page's own script.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from pipeline.report.cells import CellStatus
from pipeline.report.evidence import Evidence
from pipeline.report.rows import LineInText, ReportLine
from pipeline.report.sink import Heading, without_controls
from pipeline.report.summary import Summary, Tally
from storage.spans import joined

_TITLES = {
    CellStatus.ANSWERED: "answered",
    CellStatus.NOT_FOUND: "not found",
    CellStatus.ERROR: "errors",
    CellStatus.PENDING: "waiting",
    "doubt": "to look at",
}
_CHIPS = "".join(
    f'<button class="chip" data-status="{name}" aria-pressed="false"><b></b> {title}</button>'
    for name, title in _TITLES.items()
)


class PageSink:
    """The grid goes to the file as lines come, what a click shows to a temporary one; one document is in memory."""

    def __init__(self, file: IO[str], heading: Heading) -> None:
        self._file = file
        self._heading = heading
        self._data = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 # closed by close()
        self._lines: list[LineInText] = []
        self._documents: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        script, style = _asset("review.js"), _asset("review.css")
        policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'"
        title = _text(self._heading.title)
        job = self._heading.job
        state = "" if job.finished_at else "; not finished yet"
        about = (
            f"{_counted(self._heading.sources, 'document')} × {_counted(len(self._heading.questions), 'question')}"
            f"; {_text(job.model)}; {job.created_at:%Y-%m-%d}{state}"
        )
        heads = "".join(
            f'<th scope="col" title="{_text(self._heading.asked(number))}">{_text(question.title)}</th>'
            for number, question in enumerate(self._heading.questions)
        )
        self._file.write(
            f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>{style}</style>\n<header><div><h1>{title}</h1><p>{about} <span id=shown></span></p></div>\n"
            f'<div class="tools">{_CHIPS}<input type="search" id="search" placeholder="Search answers and files ( / )" '
            f'aria-label="Search"></div></header>\n'
            f'<main><table><thead><tr><th scope="col">Document</th>{heads}</tr></thead>\n<tbody>\n'
        )

    def add(self, found: LineInText) -> None:
        if self._lines and self._lines[0].line.row.source_position != found.line.row.source_position:
            self._write_source()
        self._lines.append(found)

    def _write_source(self) -> None:
        lines = [found.line for found in self._lines]
        row = lines[0].row
        name, row_id = _text(lines[0].document), f"d{row.source_position}"
        folder = _text(str(Path(row.source).parent))
        small = f"<small>{folder}</small>" if folder != "." else ""
        self._file.write(f'<tr id="{row_id}"><th scope="row">{name}{small}</th>')
        for line in lines:
            self._file.write(_cell(line))
        self._file.write("</tr>\n")
        pages_id = f"p{row.document_id}" if row.document_id else ""
        pages: dict[int, str] = {}
        cells = [_details(found, pages) for found in self._lines]
        _write_json(self._data, f"{row_id}-cells", {"pages": pages_id, "cells": cells})
        if row.document_id and row.document_id not in self._documents:
            self._documents.add(row.document_id)
            _write_json(self._data, pages_id, pages)
        self._lines = []

    def finish(self, summary: Summary, tally: Tally) -> None:
        if self._lines:
            self._write_source()
        self._file.write('</tbody></table><p class="none" hidden>Nothing matches.</p></main>\n')
        self._file.write(_PANEL)
        asked = [self._heading.asked(number) for number in range(len(self._heading.questions))]
        _write_json(self._file, "asked", asked)
        self._data.seek(0)
        while piece := self._data.read(1 << 20):
            self._file.write(piece)
        self._file.write(f"<script>{_asset('review.js')}</script>\n</html>\n")
        self._file.flush()

    def close(self) -> None:
        self._data.close()


_PANEL = """<aside hidden aria-label="Answer">
<div class="top"><div class="bar"><h2></h2><button id="before" title="Document before (arrow up)">↑</button>
<button id="after" title="Document after (arrow down)">↓</button><button id="close" title="Close (Esc)">×</button></div>
<p class="document"></p><p class="question"></p><p class="answer"></p><p class="words"></p><p class="facts"></p>
<p class="places"><span id="jumps"></span><button id="earlier" title="Place before (p)">‹</button>
<span id="place"></span><button id="later" title="Next place (n)">›</button></p></div>
<div class="page" tabindex="0"></div>
<div class="keys"><kbd>↑</kbd> <kbd>↓</kbd> <kbd>←</kbd> <kbd>→</kbd> move · <kbd>Enter</kbd> open ·
<kbd>n</kbd> <kbd>p</kbd> next place, place before ·
<kbd>Esc</kbd> close · <kbd>/</kbd> search</div></aside>
"""


def _cell(line: ReportLine) -> str:
    cell = line.cell
    classes = " ".join([cell.status.value, *(["doubt"] if cell.doubt else [])])
    has_pages = cell.merged is not None and len(cell.merged.values) > 1 and not cell.parsed  # in what is shown
    notes = [f"p. {', '.join(map(str, cell.pages))}"] if cell.pages and not has_pages else []
    if cell.merged:
        notes.append(f"from {cell.merged.sections} sections")
    small = f"<small>{' · '.join(notes)}</small>" if notes else ""
    shown = _text(cell.shown) or "(empty)"
    return f'<td tabindex="-1" class="{classes}" data-q="{_text(line.row.title)}"><div>{shown}</div>{small}</td>'


def _details(found: LineInText, pages: dict[int, str]) -> dict[str, Any]:
    """What a click on a cell shows. Adds the pages that its quotes stand on to `pages`."""
    cell = found.line.cell
    details: dict[str, Any] = {"status": cell.status.value, "verified": cell.verified}
    if cell.doubt:
        details["doubt"] = cell.doubt
    if cell.merged:
        details["merged"] = cell.merged.note
    if cell.shown != cell.text and not (cell.merged and len(cell.merged.values) > 1):
        details["words"] = cell.text
    if found.text is not None and cell.quotes:
        details["sheets"] = _sheets(found.text, found.line.row.page_starts, cell.quotes, pages)
    return details


def _sheets(
    text: str, page_starts: tuple[int, ...], quotes: Iterable[Evidence], pages: dict[int, str]
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Page by page what the quotes take of it: begin and end in that page's text, counted as browsers do in UTF-16
    units. A place stands once, however many quotes it is in."""
    spans = joined((quote.start, quote.stop) for quote in quotes)
    sheets = []
    for number, (begin, end) in enumerate(pairwise([*page_starts, len(text)]), 1):
        page = text[begin:end]
        marks = [
            (_units(page[: max(0, start - begin)]), _units(page[: stop - begin]))
            for start, stop in spans
            if begin < stop and start < end
        ]
        if marks:
            pages[number] = page
            sheets.append((number, marks))
    return sheets


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _asset(name: str) -> str:
    return files("pipeline.report").joinpath("page", name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _text(text: str) -> str:
    return escape(without_controls(text), quote=True)


def _write_json(file: IO[str], element_id: str, value: Any) -> None:
    """Data that a script reads. Without `<`, nothing in it can end its element or begin another."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    file.write(f'<script type="application/json" id="{element_id}">{text}</script>\n')
