import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

# Part of every document's identity: raise it whenever the same file would give another text.
EXTRACTOR = "text-2"


class Part(NamedTuple):
    """An attachment, or a file of several that were joined; it goes up to the page on which the next one begins."""

    name: str
    first_page: int


class Removed(NamedTuple):
    """Page furniture that was taken out of `page` (from 1), where it stood at offset `start` of that page."""

    page: int
    start: int
    text: str


class Place(NamedTuple):
    """Where a character stands in its file.

    `page` counts from 1; `offset` counts the characters of that page before furniture was taken out; `paragraph`
    counts the lines of the page as it is now, from 1, without the blank ones.
    """

    page: int
    offset: int
    paragraph: int


class RawPages(NamedTuple):
    """What a parser found, page by page, before normalisation. `notes` are sentences on what was not read."""

    pages: list[str]
    pages_without_text: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """Normalised text and its page map.

    Page p, counted from 1, is `text[page_starts[p - 1]:page_starts[p]]`, the last one up to the end.
    `pages_without_text` are pages, counted from 1, that are blank or scanned.
    """

    text: str
    page_starts: tuple[int, ...]
    pages_without_text: tuple[int, ...]
    kind: str
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    removed: tuple[Removed, ...] = ()

    @property
    def document_id(self) -> str:
        return document_id_of(self.text)

    @property
    def num_pages(self) -> int:
        return len(self.page_starts)

    def page_of(self, offset: int) -> int:
        """The page, counted from 1, that holds the character at `offset`."""
        if not 0 <= offset < len(self.text):
            raise IndexError(f"offset {offset} is outside the text of {len(self.text)} characters")
        return bisect_right(self.page_starts, offset)

    def place_of(self, offset: int) -> Place:
        page = self.page_of(offset)
        start = self.page_starts[page - 1]
        before = offset - start
        for removed in self.removed:
            if removed.page == page and removed.start <= before:
                before += len(removed.text)
        lines = self.text[start : offset + 1].split("\n")
        current = lines if self.text[offset] != "\n" else lines[:-1]
        return Place(page, before, max(1, sum(bool(line.strip()) for line in current)))

    def whole_pages(self) -> Iterator[str]:
        """The pages with their furniture put back."""
        for page, (start, stop) in enumerate(pairwise((*self.page_starts, len(self.text))), 1):
            text = self.text[start:stop]
            for removed in self.removed:
                if removed.page == page:
                    text = text[: removed.start] + removed.text + text[removed.start :]
            yield text

    def part_of(self, page: int) -> str | None:
        """The attachment or file that this page belongs to; None where the document is a single file."""
        names = [part.name for part in self.parts if part.first_page <= page]
        return names[-1] if names else None


def document_id_of(text: str) -> str:
    """SHA-256 of text and extractor alone: one text under two names or types is one document."""
    identity = {"extractor": EXTRACTOR, "text": text}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
