import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.documents import Document
from pipeline.documents.normalise import normalise_page, normalise_pages

# What files are made of, far oftener than chance would give it; lone surrogates among it.
TROUBLE = "\0\x02\x0b\f\r\n\t \u0085\u00a0\u00ad\u0301\u0644\u0627\u200b\u200d\u2028\ufb03\ufe8f\ufeff\ufffe\ud800aA-"
texts = st.text(st.one_of(st.sampled_from(TROUBLE), st.characters(exclude_categories=())))


@given(texts)
def test_normalising_twice_is_normalising_once(page: str) -> None:
    once = normalise_page(page)

    assert normalise_page(once) == once


@given(st.lists(texts))
def test_the_joined_pages_are_normal_themselves(pages: list[str]) -> None:
    text = normalise_pages(pages).text

    assert normalise_page(text) == text


@given(st.lists(texts, min_size=1))
def test_page_slices_one_a_page_concatenate_to_the_text(pages: list[str]) -> None:
    text, starts = normalise_pages(pages)

    slices = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert len(slices) == len(pages)
    assert "".join(slices) == text


@given(st.lists(texts, min_size=1))
def test_every_character_is_on_the_page_whose_slice_holds_it(pages: list[str]) -> None:
    text, starts = normalise_pages(pages)
    document = Document(text=text, page_starts=starts, pages_without_text=(), kind="text")

    for offset in range(len(text)):
        page = document.page_of(offset)
        end = starts[page] if page < document.num_pages else len(text)
        assert starts[page - 1] <= offset < end


@given(texts)
def test_no_control_invisible_or_unwritable_character_is_left(page: str) -> None:
    text = normalise_page(page)

    assert {unicodedata.category(character) for character in text} & {"Cc", "Cs"} <= {"Cc"}
    assert all(character == "\n" for character in text if unicodedata.category(character) == "Cc")
    assert not set(text) & set("\u00ad\u200b\u200d\u2028\ufeff\ufffe")
    text.encode()


@given(texts)
def test_blanks_are_single_and_never_at_the_end_of_a_line(page: str) -> None:
    text = normalise_page(page)

    assert "  " not in text
    assert "\n\n\n" not in text
    assert all(line == line.strip() for line in text.split("\n"))


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("one\r\ntwo\rthree\u2028four", "one\ntwo\nthree\nfour"),
        ("a\u00a0b\t \u3000c  \n   d", "a b c\nd"),
        ("a\n\n \n\t\nb\n\n", "a\n\nb"),
        ("e\u0301", "é"),
        ("e\ufb03cient \ufb01nal", "efficient final"),
        ("\ufefflist\u200bing \U000e0041", "listing"),
        ("\ufefb", "\u0644\u0627"),
        ("\uf0b7 item", "• item"),
    ],
)
def test_one_spelling_for_the_same_text(raw: str, normal: str) -> None:
    assert normalise_page(raw) == normal


@pytest.mark.parametrize(
    ("raw", "joined"),
    [
        ("agree\x02ment", "agreement"),
        ("agree\ufffement", "agreement"),
        ("agree\u00ad\nment", "agreement"),
        ("AGREE\u00adMENT", "AGREEMENT"),
        ("COVID\ufffe19", "COVID-19"),
        ("Lucene\x02BM25", "Lucene-BM25"),
        ("pre\x02 and post-closing", "pre- and post-closing"),
        ("anti\x02com\x02petitive", "anticompetitive"),
        ("end.\u00ad\nNext", "end.\nNext"),
        ("cut off\x02", "cut off-"),
    ],
)
def test_a_hyphen_at_a_lines_end_goes_between_small_letters_and_stays_elsewhere(raw: str, joined: str) -> None:
    assert normalise_page(raw) == joined


def test_a_hyphen_stays_in_a_compound_that_another_page_writes_with_it() -> None:
    text = normalise_pages(["for Non-payment of rent", "in case of non\x02payment", "such agree\x02ment"]).text

    assert text == "for Non-payment of rent\nin case of non-payment\nsuch agreement"


def test_an_empty_page_keeps_its_place_without_changing_the_text() -> None:
    assert normalise_pages(["", "one", " \n", "two", ""]) == ("one\ntwo", (0, 0, 4, 4, 7))
