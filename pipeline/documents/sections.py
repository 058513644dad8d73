"""Cutting a text that is longer than a model's context into overlapping sections, at the beginnings of clauses.

What uses it gives each section's text to the model as a document of its own. Section i is `text[start:stop]`, so a
place in a section's text plus `start` is the place in the whole, and with the whole's page map it has its page.
Neighbours share at least `overlap_tokens`, so what is said within that length stands whole in one of them; an answer
found in both has the same place in the whole.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple

CountTokens = Callable[[str], int]

_NUMERAL = "[0-9０-９零〇一二三四五六七八九十百]"
_ROMAN = "[IVXL]+"
# What a line begins with, by how good a place it is to cut before, best first.
_LINES = (
    rf"(?:ARTICLE|PART|CHAPTER|TITLE|SCHEDULE|ANNEX|EXHIBIT|APPENDIX|AMENDMENT)\s+(?:No\.?\s*)?(?:\d+|{_ROMAN}|[A-Z])\b"
    rf"|第{_NUMERAL}+[章编篇節节]|附[件表录錄]",
    rf"(?:SECTION|CLAUSE|SEC\.)\s+\d|§|第{_NUMERAL}+[条條]|제\s*\d+\s*[장조]|\d+\.?\s+\S|{_ROMAN}\.\s|[一二三四五六七八九十]+、",
    r"\d+(?:\.\d+)+\.?\s*\S",
    rf"[(（](?:[a-z]{{1,2}}|[ivxl]+|[A-Z]|\d+|{_NUMERAL}+)[)）]|[a-z][.)]\s|[•▪]",
    r"(?<=\n\n)\S",
    r"\S",
)
_LINE_START = re.compile(
    "^[ \t]*(?:" + "|".join(f"({pattern})" for pattern in _LINES) + ")", re.MULTILINE | re.IGNORECASE
)
_SENTENCE = re.compile(r"(?<=[.;:!?])\s+(?=\S)|(?<=[。；！？])(?=\S)")
_WORD = re.compile(r"(?<=\s)(?=\S)|(?<=[，、])")
_LINE_RANK, _SENTENCE_RANK, _WORD_RANK = len(_LINES) - 1, len(_LINES), len(_LINES) + 1


# A section is long enough from the first of these shares of the budget on; guesses aim at the second.
_FULL, _AIM = 0.95, 0.98


class Section(NamedTuple):
    """`text[start:stop]` of the whole text, and what `count_tokens` says of it."""

    start: int
    stop: int
    num_tokens: int


def cut_sections(text: str, *, count_tokens: CountTokens, max_tokens: int, overlap_tokens: int = 0) -> list[Section]:
    """Sections in order that cover every character; none has more than `max_tokens`.

    Each ends at the best place in its last half (article, clause, sub-clause, paragraph, line, sentence, word, and only
    where there is nothing of these between two characters), so sections are at least about half full. Neighbours share
    `overlap_tokens` or more, from the beginning of a clause or a line where that takes no more than twice as many.
    `count_tokens` counts the tokens of any piece of the text; what surrounds a document in its prompt is not counted.

    Raises:
        ValueError: the overlap is more than a quarter of `max_tokens`, or a single character has more tokens than
            `max_tokens`.
    """
    if not 0 <= overlap_tokens <= max_tokens // 4:
        raise ValueError(f"an overlap of {overlap_tokens} tokens does not fit sections of {max_tokens}")
    cutter = _Cutter(text, count_tokens)
    sections: list[Section] = []
    start = 0
    while not sections or sections[-1].stop < len(text):
        least_stop = sections[-1].stop if sections else start
        stop = cutter.stop_after(start, least_stop, max_tokens)
        sections.append(Section(start, stop, count_tokens(text[start:stop])))
        start = cutter.start_before(start, stop, overlap_tokens)
    return sections


class _Cutter:
    def __init__(self, text: str, count_tokens: CountTokens) -> None:
        self._text = text
        self._count = count_tokens
        ranks: dict[int, int] = {}
        for match in _LINE_START.finditer(text):
            ranks[match.start()] = (match.lastindex or 1) - 1
        for pattern, rank in ((_SENTENCE, _SENTENCE_RANK), (_WORD, _WORD_RANK)):
            for match in pattern.finditer(text):
                ranks.setdefault(match.end(), rank)
        self._offsets = sorted(ranks)
        self._ranks = [ranks[offset] for offset in self._offsets]
        self._characters_a_token = 4.0

    def stop_after(self, start: int, least_stop: int, max_tokens: int) -> int:
        """Where the section from `start` ends: beyond `least_stop`."""
        limit = self._longest(start, max_tokens)
        if limit <= least_stop and least_stop < len(self._text):
            raise ValueError(f"no section of {max_tokens} tokens reaches beyond the one before it")
        while limit < len(self._text):
            half = max(least_stop + 1, start + (limit - start) // 2)
            low, high = bisect_left(self._offsets, half), bisect_right(self._offsets, limit)
            best = min(range(low, high), key=lambda index: (self._ranks[index], -index), default=None)
            stop = limit if best is None else self._offsets[best]
            if self._count(self._text[start:stop]) <= max_tokens:
                return stop
            limit = max(half, stop - 1)  # a shorter piece can have more tokens, at the place where it is cut
        return limit

    def start_before(self, start: int, stop: int, overlap_tokens: int) -> int:
        """Where the next section begins: after `start`, `overlap_tokens` or a little more before `stop`."""
        if not overlap_tokens or stop == len(self._text):
            return stop
        step = max(1, int(overlap_tokens * self._characters_a_token))
        low, high = max(start, stop - step), stop
        while low > start and self._count(self._text[low:stop]) < overlap_tokens:
            low, high = max(start, low - step), low
        while high - low > 1:  # count >= overlap at low, not at high
            middle = (low + high) // 2
            low, high = (middle, high) if self._count(self._text[middle:stop]) >= overlap_tokens else (low, middle)
        for worst in (_LINE_RANK, _SENTENCE_RANK, _WORD_RANK):
            index = bisect_right(self._offsets, low) - 1
            while index >= 0 and self._ranks[index] > worst:
                index -= 1
            offset = self._offsets[index] if index >= 0 else 0
            if offset > start and overlap_tokens <= self._count(self._text[offset:stop]) <= 2 * overlap_tokens:
                return offset
        return max(low, start + 1)

    def _longest(self, start: int, max_tokens: int) -> int:
        """A stop so that the text from `start` fits and no more than a few tokens more would.

        Counting is dear, so each guess comes from how many characters a token of this text has had so far.
        """
        text, count = self._text, self._count
        if count(text[start : start + 1]) > max_tokens:
            raise ValueError(f"a single character has more than {max_tokens} tokens")
        low, high = min(start + 1, len(text)), len(text) + 1  # fits at low; does not at high, or there is no more text
        num_tokens = 0
        while high - low > 1 and num_tokens < _FULL * max_tokens:
            guess = start + int(_AIM * max_tokens * self._characters_a_token)
            if guess > len(text) and high > len(text):
                guess = len(text)
            elif not low < guess < high:
                guess = (low + high) // 2
            found = count(text[start:guess])
            if found <= max_tokens:
                low, num_tokens = guess, found
            else:
                high = guess
            self._characters_a_token = (guess - start) / max(1, found)
        return low
