from bisect import bisect_right
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.documents import ParseLimits, read_document
from pipeline.documents.normalise import normalise_pages
from pipeline.report.evidence import COMMON, DocumentIndex, Evidence

SAMPLES = Path(__file__).resolve().parents[3] / "pipeline" / "samples"

PAGES = [
    "SUPPLY AGREEMENT\n\nThe Supplier shall deliver the Parts\nwithin 30 days of each Order.",
    "The Customer shall pay each invoice within 60 days of its date. The Supplier’s liability is\n"
    "limited to EUR 2,500,000 in each Contract Year, under no circumstances more.",
    "",
    "The Customer shall pay each invoice within 60 days of its date, as amended.",
    "乙方应在收到发票后三十日内付款。本合同适用中华人民共和国法律。",
]
TEXT, PAGE_STARTS = normalise_pages(PAGES)


def find(answer: str) -> Evidence | None:
    return DocumentIndex(TEXT, PAGE_STARTS).find(answer)


@pytest.mark.parametrize(
    ("answer", "quote", "page"),
    [
        ("within 30 days of each Order", "within 30 days of each Order", 1),
        ("The invoice is due; pay each invoice within 60 days.", "pay each invoice within 60 days", 2),
        ("deliver the parts WITHIN 30 days", "deliver the Parts\nwithin 30 days", 1),
        ("The liability is limited to EUR 2,500,000.", "liability is\nlimited to EUR 2,500,000", 2),
        ("The Supplier's liability is unlimited", "The Supplier’s liability", 2),
        ("EUR 2,500,000", "EUR 2,500,000", 2),
        ("60 days", "60 days", 2),
        ("“amended”", "amended", 4),
        ("三十日", "三十日", 5),
        ("适用的法律为本合同适用中华人民共和国法律。", "本合同适用中华人民共和国法律", 5),
        ("within 60 days of its date, as amended", "within 60 days of its date, as amended", 4),
    ],
)
def test_the_longest_common_run_is_quoted_as_the_document_has_it(answer: str, quote: str, page: int) -> None:
    found = find(answer)

    assert found is not None
    assert (found.quote, found.page) == (quote, page)
    assert TEXT[found.start : found.stop] == found.quote


def test_of_several_places_the_first_is_named() -> None:
    found = find("The Customer shall pay each invoice within 60 days")

    assert found is not None
    assert found.page == 2
    assert found.start == TEXT.index("The Customer shall pay")


@pytest.mark.parametrize(
    ("answer", "quote"),
    [
        ("The Supplier shall deliver the goods to the port", "The Supplier shall deliver"),
        ("It is limited to EUR 2,500,000 in the aggregate", "limited to EUR 2,500,000"),
        ("Limited to EUR 2,500,000 in each Contract Year, under no duress", "in each Contract Year, under no"),
    ],
)
def test_a_quote_does_not_end_in_function_words_but_keeps_its_negation(answer: str, quote: str) -> None:
    found = find(answer)

    assert found is not None
    assert found.quote.endswith(quote)


@pytest.mark.parametrize(
    "answer",
    [
        *("", " ", "…", "?!", "No", "It is not", "as the", "of the"),
        "Not found in the document.",
        "Zürich",
        "90 days",
        "The answer is 60 days.",
        "of its the within to shall be in each of the and",
        "本合同的付款期限",
    ],
)
def test_an_answer_that_shares_too_little_has_no_place(answer: str) -> None:
    assert find(answer) is None


def test_a_document_without_words_holds_no_answer() -> None:
    assert DocumentIndex("* * *", (0,)).find("London") is None


def test_every_right_answer_about_the_sample_contract_is_found_on_its_page() -> None:
    document = read_document(SAMPLES / "supply-agreement.txt", limits=ParseLimits())
    index = DocumentIndex(document.text, document.page_starts)
    right = yaml.safe_load((SAMPLES / "answers.yaml").read_text())["answers"]

    found = {question_id: index.find(answer["answer"]) for question_id, answer in right.items()}

    pages = {question_id: evidence.page if evidence else None for question_id, evidence in found.items()}
    assert not {question_id: page for question_id, page in pages.items() if page not in right[question_id]["pages"]}


def test_an_answer_that_repeats_itself_is_looked_up_all_the_same() -> None:
    text = "fee " * 20_000

    found = DocumentIndex(text, (0,)).find("fee " * 40 + "due")

    assert found is not None
    assert (found.start, found.quote) == (0, ("fee " * 40).strip())


# Few different words, so that runs of every length occur; blanks, marks and both scripts.
pieces = st.sampled_from(
    ["the", "The", "fee", "of", "30", "2,500", "’s", "ß", "İ", "十", "日", "。", ".", "\n", " ", "  "]
)
texts = st.lists(pieces, max_size=60).map("".join)


@given(st.lists(texts, min_size=1, max_size=4), st.one_of(texts, st.text()))
def test_whatever_the_answer_its_quote_stands_in_the_document_on_its_page(pages: list[str], answer: str) -> None:
    text, page_starts = normalise_pages(pages)

    found = DocumentIndex(text, page_starts).find(answer)

    if found is not None:
        assert found.quote and text[found.start : found.stop] == found.quote
        assert found.page == bisect_right(page_starts, found.start)
        assert page_starts[found.page - 1] <= found.start < [*page_starts, len(text)][found.page]
        assert not COMMON.issuperset(found.quote.casefold().split())


@given(st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta", "epsilon"]), min_size=4, max_size=30), st.data())
def test_a_passage_of_the_document_is_found_whole_at_its_first_place(words: list[str], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(words) - 1))
    passage = " ".join(words[begin : data.draw(st.integers(begin + 1, len(words)))])
    text = " ".join(words)

    found = DocumentIndex(text, (0,)).find(f"zeta {passage} eta" if passage.count(" ") >= 3 else passage)

    assert found is not None
    assert found.quote == passage
    assert found.start == f" {text} ".index(f" {passage} ")


def test_a_rare_figure_in_a_short_run_points_to_its_place() -> None:
    index = DocumentIndex("The cap of clause 8 is EUR 2,500,000 in each year.\nFees of EUR 9,000 apply.", (0, 52))

    found = index.find("It is capped at EUR 2,500,000.")

    assert found is not None
    assert (found.quote, found.page) == ("EUR 2,500,000", 1)


few = st.sampled_from(["the", "of", "fee", "cap", "law", "within", "day"])


@given(st.lists(few, min_size=1, max_size=25), st.lists(st.one_of(few, st.just("absent")), max_size=12))
def test_no_longer_run_is_shared_than_the_one_that_is_found(document: list[str], answer: list[str]) -> None:
    found = DocumentIndex(" ".join(document), (0,)).find(" ".join(answer))

    shared = [
        answer[start:stop]
        for start in range(len(answer))
        for stop in range(start + 1, len(answer) + 1)
        if any(answer[start:stop] == document[at : at + stop - start] for at in range(len(document)))
    ]
    counted = [(len(run), sum(word not in COMMON for word in run), run) for run in shared]
    longest = max((length for length, telling, _ in counted if telling), default=0)
    least = min(2, len(answer))
    if found is None:  # too short, or a run of the longest has too few words that tell anything
        assert longest < 4 or any(length == longest and 0 < telling < least for length, telling, _ in counted)
    else:
        quote = found.quote.split()
        assert any(run[: len(quote)] == quote for length, telling, run in counted if length == longest and telling)
