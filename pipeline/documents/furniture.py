"""What pages repeat and no clause needs: running heads and feet, page numbers, blank lines."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from pipeline.documents.document import Removed
from pipeline.documents.normalise import PagedText

EDGE_LINES = 3
LEAST_PAGES = 3
LEAST_SHARE = 0.4

_NUMBER = re.compile(r"\d{1,5}")
_ROMAN = re.compile(r"[ivxl]{1,8}", re.IGNORECASE)
_ROMAN_VALUES = {"i": 1, "v": 5, "x": 10, "l": 50}


def remove_furniture(paged: PagedText) -> tuple[PagedText, tuple[Removed, ...]]:
    """The text without what repeats, and every removed line with its place.

    A line is furniture when it stands among the first or last EDGE_LINES lines of at least LEAST_SHARE of the pages,
    and of LEAST_PAGES at least, word for word or but for one number that counts on from page to page. Blank lines go as
    well, so copies that differ in their page breaks alone give one text.
    """
    bounds = list(pairwise((*paged.page_starts, len(paged.text))))
    pages = [paged.text[start:stop].splitlines(keepends=True) for start, stop in bounds]
    repeated = _repeated(pages)
    kept: list[str] = []
    removed: list[Removed] = []
    for number, lines in enumerate(pages, 1):
        edges = _edges(lines)
        offset, page = 0, ""
        for index, line in enumerate(lines):
            if not line.strip() or (index in edges and not repeated.isdisjoint(_forms(line, number))):
                removed.append(Removed(number, offset, line))
            else:
                page += line
            offset += len(line)
        kept.append(page)
    _drop_last_line_end(kept, pages, removed)
    starts = accumulate(map(len, kept[:-1]), initial=0)
    return PagedText("".join(kept), tuple(starts) if kept else ()), _merged(removed)


def _edges(lines: Sequence[str]) -> frozenset[int]:
    filled = [index for index, line in enumerate(lines) if line.strip()]
    return frozenset(filled[:EDGE_LINES] + filled[-EDGE_LINES:])


def _repeated(pages: Sequence[Sequence[str]]) -> frozenset[tuple[str, ...]]:
    counts: Counter[tuple[str, ...]] = Counter()
    num_filled = 0
    for number, lines in enumerate(pages, 1):
        num_filled += any(line.strip() for line in lines)
        counts.update({form for index in _edges(lines) for form in _forms(lines[index], number)})
    least = max(LEAST_PAGES, LEAST_SHARE * num_filled)
    return frozenset(form for form, count in counts.items() if count >= least)


def _forms(line: str, page: int) -> Iterator[tuple[str, ...]]:
    """The line as it is, and with each of its numbers said as its distance from the page's number."""
    text = " ".join(line.casefold().split())
    yield (text,)
    for match in _NUMBER.finditer(text):
        yield text[: match.start()], str(int(match[0]) - page), text[match.end() :]
    if numeral := _ROMAN.fullmatch(text.strip("-–—. ")):
        yield "roman", str(_roman_value(numeral[0]) - page)


def _roman_value(numeral: str) -> int:
    values = [_ROMAN_VALUES[letter] for letter in numeral]
    return sum(-value if value < following else value for value, following in pairwise([*values, 0]))


def _drop_last_line_end(kept: list[str], pages: Sequence[Sequence[str]], removed: list[Removed]) -> None:
    """A normal text does not end with a line break; here one is left over where the last lines went."""
    last = max((index for index, page in enumerate(kept) if page), default=None)
    if last is None or not kept[last].endswith("\n"):
        return
    kept[last] = kept[last][:-1]
    lines = pages[last]
    gone = {found.start for found in removed if found.page == last + 1}
    offset = end = 0
    for line in lines:
        offset += len(line)
        if offset - len(line) not in gone:
            end = offset
    removed.append(Removed(last + 1, end - 1, "\n"))


def _merged(removed: list[Removed]) -> tuple[Removed, ...]:
    """Neighbouring lines as one piece, in order of page and place."""
    merged: list[Removed] = []
    for found in sorted(removed):
        if merged and merged[-1].page == found.page and merged[-1].start + len(merged[-1].text) == found.start:
            merged[-1] = merged[-1]._replace(text=merged[-1].text + found.text)
        else:
            merged.append(found)
    return tuple(merged)
