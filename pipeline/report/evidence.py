"""Where in its document an answer stands.

The longest run of words that answer and document share, verbatim. It is found text, not a claim of the model's:
an answer that shares no such run has no page.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple

from kernels.words import CJK, WORD

LEAST_RUN = 4
LEAST_CJK_RUN = 8
MOST_PLACES = 2
WORDS_KEPT = re.compile(f"({WORD.pattern})", WORD.flags)  # to part a text at its words, and keep them
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
        between_and_words = WORDS_KEPT.split(text)
        self._written = between_and_words[1::2]
        self._starts = list(accumulate(map(len, between_and_words)))[::2]  # where each word stands
        self._words = _plain(self._written)
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
        least = LEAST_CJK_RUN if re.match(f"[{CJK}]", "".join(run)) else LEAST_RUN
        telling = sum(word not in COMMON for word in run)
        if not run or telling < min(2, len(words)):
            return None
        if len(run) < min(least, len(words)) and not any(self._is_rare_figure(word) for word in run):
            return None
        while self._words[end - 1] in DANGLING:
            end -= 1
        start, stop = self._starts[begin], self._starts[end - 1] + len(self._written[end - 1])
        return Evidence(self._text[start:stop], bisect_right(self._page_starts, start), start, stop)

    def _is_rare_figure(self, word: str) -> bool:
        return len(self._positions[word]) <= MOST_PLACES and FIGURE.search(word) is not None

    def _longest_run(self, words: list[str]) -> tuple[int, int]:
        """The words [begin, end) of the document, with at least one that is not a function word; else (0, 0).

        Of several, the one that ends first in the answer, then the first in the document. Runs through the word of the
        answer that is rarest in the document are followed first; what is left lies on one side of it, and counts only
        where that side is long enough.
        """
        length, end, begin = 0, 0, 0
        counts = [len(self._positions.get(word, ())) for word in words]
        gaps = [at for at, count in enumerate(counts) if not count]
        sides = [(left + 1, right) for left, right in pairwise([-1, *gaps, len(words)])]
        while sides:
            left, right = sides.pop()
            telling = [at for at in range(left, right) if words[at] not in COMMON]
            if right - left < length or not telling:
                continue
            middle = (left + right) / 2
            rarest = min(telling, key=lambda at: (counts[at], abs(at - middle)))
            for position in self._positions[words[rarest]]:
                first, stop = self._run_through(words, rarest, position, left, right)
                found = stop - first
                start = position - (rarest - first)
                if found > length or (found == length and (stop, start) < (end, begin)):
                    length, end, begin = found, stop, start
            sides += [(left, rarest), (rarest + 1, right)]
        return begin, begin + length

    def _run_through(self, words: list[str], at: int, position: int, left: int, right: int) -> tuple[int, int]:
        """The words [first, stop) of the answer, within [left, right), that stand around `position` as well."""
        document, shift = self._words, position - at
        first, stop = at, at + 1
        left, right = max(left, -shift), min(right, len(document) - shift)
        while first > left and document[first + shift - 1] == words[first - 1]:
            first -= 1
        while stop < right and document[stop + shift] == words[stop]:
            stop += 1
        return first, stop


def find_all(text: str, page_starts: tuple[int, ...], answers: Iterable[str]) -> list[Evidence | None]:
    index = DocumentIndex(text, page_starts)
    return [index.find(answer) for answer in answers]


def _words(text: str) -> list[str]:
    return _plain(WORD.findall(text))


def _plain(words: list[str]) -> list[str]:
    """All at once: a word holds no line end."""
    return "\n".join(words).casefold().replace("’", "'").split("\n") if words else []
