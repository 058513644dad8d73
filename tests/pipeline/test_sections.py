import math
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.documents.sections import cut_sections

PIECES = [
    "ARTICLE IV\n",
    "\n\n",
    "\n",
    "1.2 Fees ",
    "(a) ",
    "第十二条 违约责任。",
    "甲方应付款；",
    "word ",
    "longword" * 5,
    ". ",
    " ",
    "x",
    "é",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=120).map("".join)


def words(text: str) -> int:
    return len(text.split())


def byte_pairs(text: str) -> int:
    return math.ceil(len(text.encode(errors="surrogatepass")) / 2)


def runs(text: str) -> int:
    """Not additive and not monotone, like real tokenizers: a piece can have more tokens than a longer one."""
    return len(re.findall(r"longwordlongword|word |\w{1,3}|\W", text))


counters = st.sampled_from([byte_pairs, runs, len])
CountTokens = Callable[[str], int]


@given(texts, counters, st.integers(8, 60), st.floats(0, 0.25))
@settings(deadline=None)
def test_sections_cover_every_character_within_the_budget_and_overlap_as_asked(
    text: str, count: CountTokens, max_tokens: int, share: float
) -> None:
    overlap = int(max_tokens * share)

    sections = cut_sections(text, count_tokens=count, max_tokens=max_tokens, overlap_tokens=overlap)

    assert sections[0].start == 0
    assert sections[-1].stop == len(text)
    for section in sections:
        assert section.num_tokens == count(text[section.start : section.stop]) <= max_tokens
    for before, after in pairwise(sections):
        assert before.start < after.start <= before.stop < after.stop
        if count in (byte_pairs, len):  # for these, a longer piece never has fewer tokens
            assert count(text[after.start : before.stop]) >= overlap
    assert sections == cut_sections(text, count_tokens=count, max_tokens=max_tokens, overlap_tokens=overlap)


def clauses(heading: Callable[[int], str], body: str) -> str:
    return "".join(f"{heading(number)}\n{body}\n" for number in range(1, 30))


@pytest.mark.parametrize(
    ("heading", "body"),
    [
        (lambda number: f"Article {number}", "1.1 The parties agree.\n(a) first; and\n(b) second.\n" * 3),
        (lambda number: f"{number}. Fees", "The fee is due. It is 5.\n" * 6),
        (lambda number: f"§ {number} Miete", "Die Miete beträgt 5 Euro.\n\nSie ist fällig.\n" * 4),
        (lambda number: f"第{number}条 付款", "甲方应当付款，乙方应当交货。\n" * 8),
    ],
)
def test_sections_begin_where_clauses_begin(heading: Callable[[int], str], body: str) -> None:
    text = clauses(heading, body)

    sections = cut_sections(text, count_tokens=len, max_tokens=1000)

    assert len(sections) > 3
    headings = {f"{heading(number)}\n" for number in range(1, 30)}
    assert all(text[section.start :].startswith(tuple(headings)) for section in sections)


def test_a_text_that_fits_is_one_section() -> None:
    assert cut_sections("one two", count_tokens=words, max_tokens=2) == [(0, 7, 2)]
    assert cut_sections("", count_tokens=words, max_tokens=2) == [(0, 0, 0)]


@pytest.mark.parametrize("overlap", [-1, 3])
def test_an_overlap_that_leaves_no_room_is_refused(overlap: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        cut_sections("text", count_tokens=len, max_tokens=10, overlap_tokens=overlap)


def test_a_character_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="single character"):
        cut_sections("字" * 9, count_tokens=lambda text: 3 * len(text), max_tokens=2)
