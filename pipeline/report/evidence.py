"""Where in its document an answer stands.

The longest run of words that answer and document share, verbatim. It is found text, not a claim of the model's:
an answer that shares no such run has no page.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from typing import NamedTuple

_CJK = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Chinese and Japanese put no blanks between words: there each character is one.
WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+(?:[.,'’-][^\W{_CJK}]+)*")
LEAST_RUN = 4
LEAST_CJK_RUN = 8
MOST_PLACES = 2
FIGURE = re.compile(r"\d[.,]\d|\d{4}")  # an amount, a rate, a year; not the 30 of 30 days
_FUNCTION_WORDS = """
    a an the of to in on at by for from with and or any all is are be been was were will shall may must this that it
    its as not no such under which who whom if
"""
COMMON = frozenset(_FUNCTION_WORDS.split())
DANGLING = COMMON - {"not", "no"}


class Evidence(NamedTuple):
    """`quote` is document text [start, stop), on `page` (from 1), where it begins."""

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
        self._words = _words(text)
        self._positions: dict[str, list[int]] = defaultdict(list)
        for position, word in enumerate(self._words):
            self._positions[word].append(position)

    def find(self, answer: str) -> Evidence | None:
        """The longest common run, of several the first; None where it is too short or too common to point anywhere.

        A run counts from LEAST_RUN words on, or when it is the whole of a shorter answer; it must hold at least one
        word, or two in a longer answer, that is not a function word. A shorter run counts when it holds a figure that
        stands in at most MOST_PLACES places. Function words at the end are left out of the quote.
        """
        words = _words(answer)
        begin, end = self._longest_run(words)
        run = self._words[begin:end]
        least = LEAST_CJK_RUN if re.match(f"[{_CJK}]", "".join(run)) else LEAST_RUN
        telling = sum(word not in COMMON for word in run)
        if not run or telling < min(2, len(words)):
            return None
        if len(run) < min(least, len(words)) and not any(self._is_rare_figure(word) for word in run):
            return None
        while self._words[end - 1] in DANGLING:
            end -= 1
        start, stop = self._spans[begin][0], self._spans[end - 1][1]
        return Evidence(self._text[start:stop], bisect_right(self._page_starts, start), start, stop)

    def _is_rare_figure(self, word: str) -> bool:
        return len(self._positions[word]) <= MOST_PLACES and FIGURE.search(word) is not None

    def _longest_run(self, words: list[str]) -> tuple[int, int]:
        """The words [begin, end) of the document."""
        best_begin, best_end = 0, 0
        lengths: dict[int, int] = {}  # of the runs up to this word of the answer, by where they end in the document
        for word in words:
            lengths = {position + 1: lengths.get(position, 0) + 1 for position in self._positions.get(word, ())}
            for end, length in lengths.items():
                if length > best_end - best_begin:
                    best_begin, best_end = end - length, end
        return best_begin, best_end


def _words(text: str) -> list[str]:
    return [match.group().casefold().replace("’", "'") for match in WORD.finditer(text)]
