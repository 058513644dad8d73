import hashlib
import json
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

# Part of every document's identity: raise it whenever the same file would give another text.
EXTRACTOR = "text-1"


class RawPages(NamedTuple):
    """What a parser found, page by page, before normalisation."""

    pages: list[str]
    pages_without_text: tuple[int, ...] = ()


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

    @property
    def document_id(self) -> str:
        """SHA-256 of text and extractor alone: one text under two names or types is one document."""
        identity = {"extractor": EXTRACTOR, "text": self.text}
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def num_pages(self) -> int:
        return len(self.page_starts)

    def page_of(self, offset: int) -> int:
        """The page, counted from 1, that holds the character at `offset`."""
        if not 0 <= offset < len(self.text):
            raise IndexError(f"offset {offset} is outside the text of {len(self.text)} characters")
        return bisect_right(self.page_starts, offset)
