"""One spelling for the same text, whatever file it came from.

Per page, in this order: line ends to LF; line-end hyphens resolved; control, zero-width and other
invisible characters and lone surrogates removed; ligatures and presentation forms spelled out; NFC;
every run of blanks to one space and none at either end of a line; at most one blank line in a row,
none at either end of the page.

Line-end hyphens. pdfium marks a hyphen at a line's end with U+0002 or U+FFFE and drops the line
break; files of other kinds may hold soft hyphens. Whether the writer meant `agree-ment` or
`non-payment` is lost, so: two lower-case letters are joined without a hyphen, unless the document
writes that very compound with its hyphen elsewhere; between other letters or digits the hyphen stays
(`COVID-19`), except that a soft hyphen between two capitals is dropped as well.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

_MARKS = "\u0002\ufffe\u00ad"
_LINE_END_HYPHEN = re.compile(rf"[{_MARKS}]+(?:[^\S\n]*\n[^\S\n]*)?")
_COMPOUND = re.compile(r"\w+-\w+")
_LAST_WORD = re.compile(r"\w*\Z")
_WORD = re.compile(r"\w*")
_LONGEST_WORD = 40

_LINE_BREAK = re.compile("\r\n|[\r\v\f\u0085\u2028\u2029]")
_PRESENTATION_FORMS = re.compile("[\ufb00-\ufdcf\ufdf0-\ufdf9\ufe70-\ufefc]+")
_BLANKS = re.compile(r"[^\S\n]+")
_BLANK_LINES = re.compile(r"\n{3,}")

_INVISIBLE = frozenset(
    chain(
        range(0x09),
        range(0x0B, 0x20),
        range(0x7F, 0xA0),
        (0x00AD, 0x034F, 0x061C, 0x180E, 0xFEFF),
        range(0x200B, 0x2010),  # zero-width space and joiners, direction marks
        range(0x202A, 0x202F),  # direction embeddings
        range(0x2060, 0x2070),
        range(0xD800, 0xE000),  # lone surrogates: not writable as UTF-8
        range(0xFDD0, 0xFDF0),  # noncharacters
        (plane + last for plane in range(0, 0x110000, 0x10000) for last in (0xFFFE, 0xFFFF)),
        range(0xE0000, 0xE0080),  # tags: an invisible copy of ASCII
    )
)
# Bullets that symbol fonts keep in the private area.
_TRANSLATION: dict[int, str | None] = {**dict.fromkeys(_INVISIBLE), 0xF0A7: "▪", 0xF0B7: "•"}


class PagedText(NamedTuple):
    text: str
    page_starts: tuple[int, ...]


def normalise_pages(pages: Sequence[str]) -> PagedText:
    """The pages joined by LF, each LF belonging to the page before it; an empty page is an empty slice."""
    compounds = _hyphenated_compounds(pages)
    contents = [normalise_page(page, compounds=compounds) for page in pages]
    last = max((index for index, content in enumerate(contents) if content), default=0)
    slices = [f"{content}\n" if content and index < last else content for index, content in enumerate(contents)]
    starts = accumulate(map(len, slices[:-1]), initial=0)
    return PagedText("".join(slices), tuple(starts) if slices else ())


def normalise_page(page: str, *, compounds: Collection[str] = ()) -> str:
    """`compounds` are the hyphenated words, in lower case, that the document writes in full elsewhere."""
    page = _LINE_BREAK.sub("\n", page)
    page = _LINE_END_HYPHEN.sub(lambda mark: _join(mark, compounds), page)
    page = page.translate(_TRANSLATION)
    page = _PRESENTATION_FORMS.sub(lambda forms: unicodedata.normalize("NFKC", forms[0]), page)
    page = unicodedata.normalize("NFC", page)
    page = _BLANKS.sub(" ", page)
    page = "\n".join(line.strip(" ") for line in page.split("\n"))
    return _BLANK_LINES.sub("\n\n", page).strip("\n")


def _hyphenated_compounds(pages: Sequence[str]) -> frozenset[str]:
    if not any(mark in page for page in pages for mark in _MARKS):
        return frozenset()
    return frozenset(compound.lower() for page in pages for compound in _COMPOUND.findall(page))


def _join(mark: re.Match[str], compounds: Collection[str]) -> str:
    text, start, end = mark.string, mark.start(), mark.end()
    before, after = text[start - 1 : start], text[end : end + 1]
    line_break = mark[0].lstrip(_MARKS)
    soft = "\u00ad" in mark[0]
    if not before.isalnum():
        return line_break
    if not after.isalnum():
        return line_break if soft else f"-{line_break}"
    if before.islower() and after.islower():
        left = _LAST_WORD.search(text, max(0, start - _LONGEST_WORD), start)
        right = _WORD.match(text, end, end + _LONGEST_WORD)
        assert left and right  # both patterns match the empty word too
        return "-" if f"{left[0]}-{right[0]}".lower() in compounds else ""
    return "" if soft and before.isupper() and after.isupper() else "-"
