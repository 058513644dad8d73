"""The text of a Word file as a reader sees it, walked straight from its XML.

Tracked changes are accepted, rejected or marked, as [+put in+] and [-taken out-]. Hidden text and field codes are
left out, comments too unless asked for. Headers stand once at the beginning, footers once at the end; text boxes,
notes and comments follow the paragraph they hang on.
Pages are where the author broke them and where Word last laid them out.
"""

import posixpath
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import PurePath
from xml.etree.ElementTree import Element, ParseError
from zipfile import BadZipFile, ZipFile

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from pipeline.documents.document import RawPages
from pipeline.documents.numbering import Numbering, roman
from pipeline.documents.options import ReadOptions, Tracked
from pipeline.documents.word_xml import is_on, value
from pipeline.errors import (
    EmptyDocument,
    EncryptedDocument,
    NoTextLayer,
    ParseLimitExceeded,
    UnreadableDocument,
    UnsupportedType,
)

_MAX_XML_BYTES = 256 * 2**20

_PAGE = "\f"
_LAID_OUT_PAGE = "\x0e"  # where Word last began a page; like the form feed no character of XML
_BREAKS = _PAGE + _LAID_OUT_PAGE
_BOTH_BREAKS = re.compile(rf"{_PAGE}(\s*){_LAID_OUT_PAGE}")

_OTHER_PACKAGES = {
    "xl/workbook.xml": "an Excel workbook",
    "ppt/presentation.xml": "a PowerPoint presentation",
    "content.xml": "an OpenDocument file",
}
_WRAPPERS = {"sdt", "sdtContent", "customXml", "smartTag"}
_INSERTED = {"ins", "moveTo"}
_DELETED = {"del", "moveFrom"}
_NOT_SHOWN = {"pPr", "rPr", "rt", "delInstrText"}
_SIGNS = {
    "tab": "\t",
    "ptab": "\t",
    "cr": "\n",
    "noBreakHyphen": "-",
    "lastRenderedPageBreak": _LAID_OUT_PAGE,
}
_WINGDINGS = {0x6F: "☐", 0xA8: "☐", 0xA7: "▪", 0xB7: "•", 0xFB: "✗", 0xFC: "✓", 0xFD: "☒", 0xFE: "☑"}


def read_docx(path: PurePath, data: bytes, options: ReadOptions) -> RawPages:
    try:
        with ZipFile(BytesIO(data)) as archive:
            package = _Package(path, archive)
            text = _whole_text(path, package, options)
    except (BadZipFile, EOFError, KeyError, NotImplementedError, zlib.error) as exc:
        raise UnreadableDocument(path, reason="it is damaged or not a Word file") from exc
    except (ParseError, DefusedXmlException) as exc:
        raise UnreadableDocument(path, reason="its XML is broken or unsafe") from exc
    text = _BOTH_BREAKS.sub(rf"{_PAGE}\1", text).replace(_LAID_OUT_PAGE, _PAGE)
    if not text.strip():
        if package.has_images:
            raise NoTextLayer(path, num_pages_without_text=1, num_pages=1)
        raise EmptyDocument(path)
    return RawPages(text.rstrip().split(_PAGE))


def _whole_text(path: PurePath, package: "_Package", options: ReadOptions) -> str:
    if next(package.main.iter("altChunk"), None) is not None:
        raise UnreadableDocument(path, reason="it embeds a second file that only Word can show")
    story = _Story(package, options)
    body = story.blocks(package.body)
    headers, footers = (
        # Most are repeated for first, even and other pages.
        dict.fromkeys(_without_breaks(story.blocks(margin)) for margin in package.margins(reference))
        for reference in ("headerReference", "footerReference")
    )
    return "".join([*headers, body, *footers])


class _Package:
    """The parts of the file, their tags and attributes without namespaces (there are two sets of these)."""

    def __init__(self, path: PurePath, archive: ZipFile) -> None:
        infos = archive.infolist()
        if any(info.flag_bits & 1 for info in infos):
            raise EncryptedDocument(path)
        if sum(info.file_size for info in infos if info.filename.endswith((".xml", ".rels"))) > _MAX_XML_BYTES:
            raise ParseLimitExceeded(path, resource="unpacked size", limit=_MAX_XML_BYTES / 2**20, unit="MiB")
        names = {info.filename for info in infos}
        if "word/document.xml" not in names:
            known = next((name for name in _OTHER_PACKAGES if name in names), None)
            if known or "_rels/.rels" not in names:
                raise UnsupportedType(path, found=_OTHER_PACKAGES[known] if known else "a ZIP archive")
        self.has_images = any(name.startswith("word/media/") for name in names)
        self._archive = archive
        self._names = names
        mains = (target for kind, target in self._relations("").values() if kind == "officeDocument")
        main = next(mains, "word/document.xml")
        self._main_relations = self._relations(main)
        self.main = self._part(main)
        body = self.main.find("body")
        if body is None:
            raise KeyError("body")
        self.body = body
        self.sections = [*body.iterfind(".//p/pPr/sectPr"), *body.iterfind("sectPr")]

    def related(self, kind: str) -> Element:
        """The part of this kind, or an empty one."""
        targets = (target for found, target in self._main_relations.values() if found == kind)
        target = next(targets, None)
        return Element(kind) if target is None else self._part(target)

    def margins(self, reference: str) -> list[Element]:
        ids = (found.get("id", "") for section in self.sections for found in section.iterfind(reference))
        targets = dict.fromkeys(self._main_relations[id_][1] for id_ in ids if id_ in self._main_relations)
        return [self._part(target) for target in targets]

    def _part(self, name: str) -> Element:
        root: Element = fromstring(self._archive.read(name))
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
            element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        return root

    def _relations(self, name: str) -> dict[str, tuple[str, str]]:
        """Id -> (kind, part), of one part or (for the empty name) of the whole file."""
        folder, file = posixpath.split(name)
        relations = posixpath.join(folder, "_rels", f"{file}.rels")
        if relations not in self._names:
            return {}
        return {
            relation.get("Id", ""): (
                posixpath.basename(relation.get("Type", "")),
                posixpath.normpath(posixpath.join("/", folder, relation.get("Target", ""))).lstrip("/"),
            )
            for relation in self._part(relations)
            if relation.get("TargetMode") != "External"
        }


class _Story:
    """Walks blocks (paragraphs, tables) and what runs in them; lists and notes count on from call to call."""

    def __init__(self, package: _Package, options: ReadOptions) -> None:
        self._tracked = options.tracked
        # The changes to leave out, and of these the one that takes ends of paragraphs, rows and cells along.
        rejects = options.tracked is Tracked.REJECT
        marks = options.tracked is Tracked.MARK
        self._left_out = set() if marks else _INSERTED if rejects else _DELETED
        self._gone = "" if marks else "ins" if rejects else "del"
        self._comments = {
            comment.get("id"): comment for comment in (package.related("comments") if options.comments else ())
        }
        self._numbering = Numbering(package.related("numbering"), package.related("styles"))
        self._notes = {
            f"{kind}Reference": {note.get("id"): note for note in package.related(f"{kind}s")}
            for kind in ("footnote", "endnote")
        }
        self._num_notes: Counter[str] = Counter()
        # How a section begins is told by its own properties, which stand at its end.
        self._next_section = dict(pairwise(package.sections))
        self._carry = ""  # text of paragraphs whose end was deleted
        self._hanging: list[str] = []
        self._fields: list[bool] = []  # per open field: are we in its result?

    def blocks(self, parent: Element) -> str:
        text = "".join(map(self._block, parent))
        carry, self._carry = self._carry, ""
        return f"{text}{carry}\n" if carry else text

    def _block(self, element: Element) -> str:
        if element.tag == "p":
            return self._paragraph(element)
        if element.tag == "tbl":
            return "".join(map(self._row, self._rows_or_cells(element, "tr")))
        if element.tag == "AlternateContent":
            return self.blocks(_shown_alternative(element))
        if element.tag in _INSERTED | _DELETED:
            return self._changed(element.tag, self.blocks(element))
        return self.blocks(element) if element.tag in _WRAPPERS else ""

    def _changed(self, tag: str, text: str) -> str:
        """What a tracked change holds, as it is shown."""
        if tag in self._left_out:
            return ""
        if self._tracked is not Tracked.MARK or not text.strip():
            return text
        sign = "+" if tag in _INSERTED else "-"
        end = text[len(text.rstrip("\n")) :]
        return f"[{sign}{text.rstrip(chr(10))}{sign}]{end}"

    def _paragraph(self, paragraph: Element) -> str:
        carry, self._carry = self._carry, ""
        outer_hanging, self._hanging = self._hanging, []
        text = carry + self._inline(paragraph)
        hanging, self._hanging = "".join(self._hanging), outer_hanging
        self._fields = [in_result for in_result in self._fields if in_result]
        properties = paragraph.find("pPr")
        if properties is None:
            properties = Element("pPr")
        if self._gone and properties.find(f"rPr/{self._gone}") is not None:
            self._carry = text
            return hanging
        breaks = text[: len(text) - len(text.lstrip(_BREAKS))]
        text = text.lstrip(_BREAKS)
        label = self._numbering.label(properties)
        if text.strip() or label.strip(" •"):
            text = label + text
        before = _PAGE if is_on(properties, "pageBreakBefore") else ""
        after = _PAGE if self._begins_page_after(properties.find("sectPr")) else ""
        return f"{before}{breaks}{text}\n{hanging}{after}"

    def _begins_page_after(self, section: Element | None) -> bool:
        following = None if section is None else self._next_section.get(section)
        return following is not None and value(following, "type") not in ("continuous", "nextColumn")

    def _row(self, row: Element) -> str:
        cells = [self.blocks(cell) for cell in self._rows_or_cells(row, "tc")]
        changes = [tag for tag in ("ins", "del") if row.find(f"trPr/{tag}") is not None]
        line = self._line(cells)
        # Word marks what a changed row holds as well, other programs the row alone.
        return self._changed(changes[0], line) if changes and not line.startswith("[") else line

    def _line(self, cells: list[str]) -> str:
        if len(cells) == 1:
            return cells[0]
        line = " | ".join(" ".join(_without_breaks(cell).split()) for cell in cells)
        line = f"{line}\n" if line.strip(" |") else ""
        found = set("".join(cells)) & set(_BREAKS)
        page = _PAGE if _PAGE in found else "".join(found)
        return page + line if any(cell.startswith(tuple(_BREAKS)) for cell in cells) else line + page

    def _rows_or_cells(self, parent: Element, tag: str) -> Iterator[Element]:
        for child in parent:
            if child.tag in _WRAPPERS or (child.tag in _INSERTED | _DELETED and child.tag not in self._left_out):
                yield from self._rows_or_cells(child, tag)
            elif child.tag == tag and not self._is_gone(child):
                yield child

    def _is_gone(self, row_or_cell: Element) -> bool:
        if not self._gone:
            return False
        cell_change = f"tcPr/cell{self._gone.capitalize()}"
        return row_or_cell.find(f"trPr/{self._gone}") is not None or row_or_cell.find(cell_change) is not None

    def _inline(self, parent: Element) -> str:
        return "".join(map(self._piece, parent))

    def _piece(self, element: Element) -> str:
        tag = element.tag
        if tag in _NOT_SHOWN or tag in self._left_out:
            return ""
        if tag in _INSERTED | _DELETED:
            return self._changed(tag, self._inline(element))
        if tag == "r":
            text = self._inline(element)
            return "" if is_on(element, "rPr/vanish") else text
        if tag == "fldChar":
            return self._field(element)
        if tag == "txbxContent":
            self._hanging.append(_without_breaks(self.blocks(element)))
            return ""
        if tag in self._notes:
            self._hang_note(tag, element.get("id"))
            return ""
        if tag == "commentReference" and (comment := self._comments.get(element.get("id"))) is not None:
            text = _without_breaks(self.blocks(comment)).strip()
            self._hanging.append(f"[Comment by {comment.get('author') or 'somebody'}: {text}]\n")
            return ""
        if tag == "AlternateContent":
            return self._inline(_shown_alternative(element))
        if len(element):
            return self._inline(element)
        return _sign(element) if all(self._fields) else ""

    def _field(self, mark: Element) -> str:
        match mark.get("fldCharType"):
            case "begin":
                self._fields.append(False)
                if (box := mark.find("ffData/checkBox")) is not None:
                    checked = is_on(box, "default" if box.find("checked") is None else "checked")
                    return "☒" if checked else "☐"
            case "separate" if self._fields:
                self._fields[-1] = True
            case "end" if self._fields:
                self._fields.pop()
        return ""

    def _hang_note(self, reference: str, id_: str | None) -> None:
        note = self._notes[reference].get(id_)
        if note is not None:
            self._num_notes[reference] += 1
            number = self._num_notes[reference]
            label = str(number) if reference == "footnoteReference" else roman(number).lower()
            self._hanging.append(f"[{label}] {_without_breaks(self.blocks(note)).strip()}\n")


def _sign(element: Element) -> str:
    if element.tag in ("t", "delText"):
        return element.text or ""
    if element.tag == "br":
        return _PAGE if element.get("type") == "page" else "\n"
    if element.tag == "sym":
        code = int(element.get("char", "20"), 16)
        is_wingding = element.get("font", "").startswith("Wingdings")
        return _WINGDINGS.get(code & 0xFF, chr(code)) if is_wingding else chr(code)
    return _SIGNS.get(element.tag, "")


def _shown_alternative(element: Element) -> Element:
    """The newest form; the fallback for old programs says the same once more."""
    choice = element.find("Choice")
    if choice is None:
        choice = element.find("Fallback")
    return Element("Choice") if choice is None else choice


def _without_breaks(text: str) -> str:
    return text.replace(_PAGE, " ").replace(_LAID_OUT_PAGE, " ")
