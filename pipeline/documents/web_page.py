"""The text of HTML as a browser would lay it out, roughly: blocks are lines, table rows are lines of cells."""

import re
from html.parser import HTMLParser
from pathlib import PurePath

from pipeline.documents.charset import decode
from pipeline.documents.document import RawPages
from pipeline.documents.numbering import number_label
from pipeline.errors import UnreadableDocument

_PAGE = "\f"
_HEAD_BYTES = 2048
_CHARSET = re.compile(rb"""<(?:meta[^>]*?charset|\?xml[^>]*?encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
# Browsers read the older name as its superset.
_SUPERSETS = {"iso-8859-1": "cp1252", "latin1": "cp1252", "us-ascii": "cp1252", "gb2312": "gb18030", "gbk": "gb18030"}

_NOT_SHOWN = {"script", "style", "head", "template", "noscript", "title", "svg", "math", "iframe", "object", "select"}
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
# fmt: off
_BLOCKS = {
    "address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "dialog", "div",
    "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4",
    "h5", "h6", "header", "hgroup", "html", "legend", "li", "main", "menu", "nav", "ol",
    "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead", "tr", "ul",
}
# fmt: on
_PARAGRAPHS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "table", "ul", "ol", "dl", "blockquote", "pre"}
_NUMBER_FORMATS = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
_HIDDEN_STYLE = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_BREAK_STYLE = re.compile(r"(?:page-)?break-(before|after)\s*:\s*(?:always|page|left|right)", re.IGNORECASE)
_CLAUSE_LABEL = re.compile(r"[(（]?(?:\d+(?:\.\d+)*|[A-Za-z]{1,4})[.)）]|\d+(?:\.\d+)+|§\s*\d+|[•▪·-]")
_BLANKS = re.compile(r"[ \t\n\r\f]+")

Attributes = list[tuple[str, str | None]]


def read_html(path: PurePath, data: bytes) -> RawPages:
    declared = _CHARSET.search(data[:_HEAD_BYTES])
    name = declared[1].decode("ascii").lower() if declared else ""
    try:
        text = (
            data.decode(_SUPERSETS.get(name, name)) if name and not data.startswith(b"\xef\xbb\xbf") else decode(data)
        )
    except (LookupError, UnicodeDecodeError):
        text = decode(data)
    if "\0" in text[:_HEAD_BYTES]:
        raise UnreadableDocument(path, reason="it holds binary data, not text")
    return html_pages(text)


def html_pages(text: str) -> RawPages:
    layout = _Layout()
    layout.feed(text)
    layout.close()
    pages = layout.text().split(_PAGE)
    while len(pages) > 1 and not pages[-1].strip():
        del pages[-1]
    return RawPages(pages)


class _List:
    def __init__(self, ordered: bool, number_format: str, number: int) -> None:
        self.ordered, self.number_format, self.number = ordered, number_format, number


class _Layout(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._out: list[str] = []
        self._open: list[tuple[str, bool, bool]] = []  # tag, hidden, page break at its end
        self._hidden = 0
        self._preformatted = 0
        self._lists: list[_List] = []
        self._rows: list[list[str] | None] = []  # of each open table: the cells of its open row
        self._cells: list[list[str]] = []  # what was being written when each open cell began

    def text(self) -> str:
        while self._open:
            self._end(self._open[-1][0])
        return "".join(self._out)

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        found = dict(attrs)
        style = found.get("style") or ""
        breaks = {where.lower() for where in _BREAK_STYLE.findall(style)}
        if not self._hidden:
            self._close_implied(tag)
            if "before" in breaks:
                self._write(_PAGE)
            self._begin(tag, found)
        if tag in _VOID:
            if "after" in breaks and not self._hidden:
                self._write(_PAGE)
            return
        hidden = tag in _NOT_SHOWN or "hidden" in found or _HIDDEN_STYLE.search(style) is not None
        # The head ends where a body begins, whether or not anybody closed it.
        if tag == "body":
            self._hidden = 0
            self._open = [(name, False, after) for name, _, after in self._open if name not in _NOT_SHOWN]
        self._hidden += hidden
        self._open.append((tag, hidden, "after" in breaks))

    def handle_startendtag(self, tag: str, attrs: Attributes) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "br":
            self._write("\n")
        elif any(name == tag for name, _, _ in self._open):
            while self._open and self._end(self._open[-1][0]) != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._preformatted:
            self._out.append(data)
            return
        text = _BLANKS.sub(" ", data)
        if text.strip() or self._is_in_line():
            self._out.append(text)

    def _is_in_line(self) -> bool:
        return bool(self._out) and not self._out[-1].endswith(("\n", _PAGE))

    def _write(self, text: str) -> None:
        if not self._hidden:
            self._out.append(text)

    def _new_line(self) -> None:
        if self._is_in_line():
            self._write("\n")

    def _close_implied(self, tag: str) -> None:
        """End tags that may be left out: a paragraph ends where a block begins, an item where the next one does."""
        ends = {
            "li": ("li", "ul ol menu"),
            "tr": ("tr", "table"),
            "td": ("td th", "tr table"),
            "th": ("td th", "tr table"),
            "dd": ("dd dt", "dl"),
            "dt": ("dd dt", "dl"),
            "option": ("option", "select"),
        }.get(tag)
        if ends is None and tag in _BLOCKS:
            ends = ("p", "td th li div table")
        if ends is None:
            return
        closing, fence = ends[0].split(), ends[1].split()
        for name, _, _ in reversed(self._open):
            if name in closing:
                self.handle_endtag(name)
                return
            if name in fence:
                return

    def _begin(self, tag: str, attrs: dict[str, str | None]) -> None:
        if tag == "br":
            self._write("\n")
        elif tag == "input" and (attrs.get("type") or "").lower() in ("checkbox", "radio"):
            self._write("☒ " if "checked" in attrs else "☐ ")
        elif tag in ("td", "th") and self._rows:
            self._cells.append(self._out)
            self._out = []
        elif tag in _BLOCKS:
            self._new_line()
            if tag == "pre":
                self._preformatted += 1
            elif tag in ("ol", "ul", "menu"):
                start = attrs.get("start") or "1"
                number = int(start) if re.fullmatch(r"-?\d{1,6}", start) else 1
                self._lists.append(_List(tag == "ol", _NUMBER_FORMATS.get(attrs.get("type") or "", "decimal"), number))
            elif tag == "li":
                self._label(attrs)
            elif tag == "table":
                self._rows.append(None)
            elif tag == "tr" and self._rows:
                self._rows[-1] = []

    def _label(self, attrs: dict[str, str | None]) -> None:
        if not self._lists or not self._lists[-1].ordered:
            self._write("• ")
            return
        current = self._lists[-1]
        told = attrs.get("value") or ""
        if re.fullmatch(r"-?\d{1,6}", told):
            current.number = int(told)
        self._write(f"{number_label(current.number, current.number_format)}. ")
        current.number += 1

    def _end(self, tag: str) -> str:
        _, hidden, breaks_after = self._open.pop()
        self._hidden -= hidden
        if hidden or self._hidden:
            return tag
        if tag in ("td", "th") and self._cells:
            content = "".join(self._out)
            self._out = self._cells.pop()
            row = self._rows[-1] if self._rows else None
            if row is None:
                self._out.append(content)
            else:
                row.append(content)
        elif tag == "tr" and self._rows:
            self._end_row()
        elif tag == "table" and self._rows:
            self._end_row()
            self._rows.pop()
        elif tag == "pre":
            self._preformatted -= 1
        elif tag in ("ol", "ul", "menu") and self._lists:
            self._lists.pop()
        if tag in _BLOCKS:
            self._new_line()
        if tag in _PARAGRAPHS:
            self._write("\n")
        if breaks_after:
            self._write(_PAGE)
        return tag

    def _end_row(self) -> None:
        """Layout tables, with one cell that says something, are text; filings set their clauses in such."""
        cells, self._rows[-1] = self._rows[-1] or [], None
        filled = [cell for cell in cells if cell.strip()]
        if not filled:
            return
        if len(filled) == 1:
            self._write(filled[0].strip("\n") + "\n")
        elif len(filled) == 2 and _CLAUSE_LABEL.fullmatch(filled[0].strip()) and "\n" in filled[1].strip():
            self._write(f"{filled[0].strip()} {filled[1].strip()}\n")
        else:
            row = " | ".join(" ".join(cell.replace(_PAGE, " ").split()) for cell in cells)
            page = _PAGE if any(_PAGE in cell for cell in cells) else ""
            self._write(f"{row}\n{page}")
