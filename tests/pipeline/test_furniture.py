from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipeline.documents import Document, Normalise, ReadOptions, read_document
from pipeline.documents.furniture import remove_furniture
from pipeline.documents.normalise import normalise_page, normalise_pages
from tests.pipeline.made_files import LIMITS, text_file

CLAUSES = [f"{number}. Clause number {number} says something of its own." for number in range(1, 41)]
FURNITURE = ReadOptions(normalise=Normalise.FURNITURE)

page_lines = st.sampled_from(["Head", "Foot 1", "", "- 2 -", "iv", "clause", "Page 3 of 9", "word"]) | st.text(
    max_size=5
)
pages = st.lists(st.lists(page_lines, max_size=9).map("\n".join), min_size=1, max_size=8)


def laid_out(lines_a_page: int, *, first: int = 1) -> str:
    chunks = [CLAUSES[start : start + lines_a_page] for start in range(0, len(CLAUSES), lines_a_page)]
    return "\f".join(
        "\n\n".join(["Supply Agreement", *chunk, "Confidential", f"Page {first + index} of {len(chunks)}"])
        for index, chunk in enumerate(chunks)
    )


def test_copies_that_differ_in_page_breaks_and_numbers_are_one_document(tmp_path: Path) -> None:
    texts = [laid_out(5), laid_out(8), laid_out(10, first=7)]

    documents = [
        read_document(text_file(tmp_path, text, f"{index}.txt"), limits=LIMITS, options=FURNITURE)
        for index, text in enumerate(texts)
    ]

    assert {document.text for document in documents} == {"\n".join(CLAUSES)}
    assert len({document.document_id for document in documents}) == 1
    assert [document.page_of(document.text.index("30. ")) for document in documents] == [6, 4, 3]


def test_nothing_is_removed_unless_asked(tmp_path: Path) -> None:
    document = read_document(text_file(tmp_path, laid_out(5)), limits=LIMITS)

    assert document.text.count("Confidential") == 8
    assert document.removed == ()


def test_roman_page_numbers_go_and_the_numbers_of_clauses_stay() -> None:
    numerals = ["i", "ii", "iii", "iv", "v"]
    pages = [
        f"{3 * index}. Clause {letter}\nText {letter} of it.\nMore {letter}.\nLast {letter}.\n- {numeral} -"
        for index, (letter, numeral) in enumerate(zip("abcde", numerals, strict=True))
    ]

    paged, removed = remove_furniture(normalise_pages(pages))

    assert [piece.text.strip() for piece in removed] == [f"- {numeral} -" for numeral in numerals]
    assert all(f"{3 * index}. Clause" in paged.text for index in range(5))


def test_a_line_on_few_pages_stays() -> None:
    pages = [f"Heading\ntext {letter}\nof page" if letter in "ab" else f"t{letter}\nu" for letter in "abcdefgh"]

    assert "Heading" in remove_furniture(normalise_pages(pages))[0].text


@given(pages)
def test_what_was_removed_can_be_put_back_and_every_character_has_its_old_place(raw: list[str]) -> None:
    before = normalise_pages(raw)
    after, removed = remove_furniture(before)
    document = Document(after.text, after.page_starts, (), "text", removed=removed)

    whole = list(document.whole_pages())

    bounds = [*before.page_starts, len(before.text)]
    assert whole == [before.text[bounds[index] : bounds[index + 1]] for index in range(len(raw))]
    for offset, character in enumerate(after.text):
        place = document.place_of(offset)
        assert whole[place.page - 1][place.offset] == character
        assert place.paragraph >= 1


@given(pages)
def test_the_text_without_furniture_is_normal_and_has_no_blank_lines(raw: list[str]) -> None:
    text = remove_furniture(normalise_pages(raw))[0].text

    assert normalise_page(text) == text
    assert "\n\n" not in text
