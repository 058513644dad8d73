"""Where in its document an answer stands.

The longest run of words that answer and document share, verbatim. It is found text, not a claim of the model's:
an answer that shares no such run has no page.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from typing import NamedTuple

WORD = re.compile(r"\w+(?:[.,'’-]\w+)*|[\u3400-\u9fff]")
LEAST_RUN = 4
COMMON = frozenset(
    ["a", "an", "the", "of", "to", "in", "on", "at", "by", "for", "from", "with", "and", "or", "any", "all", "is", "are", "be", "been", "was", "were", "will", "shall", "may", "must", "this", "that", "it", "its", "as", "not", "no", "such", "under", "which", "who", "whom", "if"]
)


class Evidence(NamedTuple):
    """`quote` is document text [start, stop), on `page` (from 1)."""

    quote: str
    page: int
    start: int
    stop: int


class DocumentIndex:
    """The words of one document, for looking up many answers."""

    def __init__(self, text: str, page_starts: tuple[int, ...]) -> None:
        self._text = text
        self._page_starts = page_starts
        self._spans = [match.span() for match in WORD.finditer(text)]
        self._words = [text[start:stop].casefold() for start, stop in self._spans]
        self._positions: dict[str, list[int]] = defaultdict(list)
        for position, word in enumerate(self._words):
            self._positions[word].append(position)

    def find(self, answer: str) -> Evidence | None:
        """The longest common run; None where it is too short or too common to point anywhere.

        A run counts from LEAST_RUN words on, or when it is the whole of a shorter answer; it must hold at least one
        word, or two in a longer answer, that is not a function word.
        """
        words = [match.group().casefold() for match in WORD.finditer(answer)]
        best_at, best_len = 0, 0
        for index, word in enumerate(words):
            for position in self._positions.get(word, ()):
                length = 1
                while (
                    index + length < len(words)
                    and position + length < len(self._words)
                    and words[index + length] == self._words[position + length]
                ):
                    length += 1
                if length > best_len:
                    best_at, best_len = position, length
        run = self._words[best_at : best_at + best_len]
        telling = sum(word not in COMMON for word in run)
        if best_len < min(LEAST_RUN, len(words)) or telling < min(2, len(words)):
            return None
        start, stop = self._spans[best_at][0], self._spans[best_at + best_len - 1][1]
        return Evidence(self._text[start:stop], bisect_right(self._page_starts, start), start, stop)
