from pathlib import Path

import pytest
import yaml

import pipeline
from pipeline.documents import Document
from pipeline.documents.sections import cut_sections
from pipeline.questions import load_questions
from pipeline.report.evidence import DocumentIndex
from tests.pipeline.made_files import read, text_file

SAMPLES = Path(pipeline.__file__).parent / "samples"
CHINESE = SAMPLES / "purchase-contract-zh.txt"


@pytest.fixture(scope="module")
def chinese() -> Document:
    return read(CHINESE)


def test_the_chinese_contract_is_one_document_in_every_encoding_of_its_language(
    chinese: Document, tmp_path: Path
) -> None:
    text = CHINESE.read_text("utf-8")

    found = [
        read(text_file(tmp_path, text.encode(encoding), f"{encoding}.txt"))
        for encoding in ("gb18030", "gbk", "utf-8-sig", "utf-16", "utf-32")
    ]

    assert {document.document_id for document in found} == {chinese.document_id}


def test_the_chinese_word_file_holds_the_same_characters_on_the_same_pages(chinese: Document) -> None:
    word = read(SAMPLES / "purchase-contract-zh.docx")

    bare = [["".join(page.replace("|", "").split()) for page in document.whole_pages()] for document in (chinese, word)]
    assert bare[0] == bare[1]
    assert word.num_pages == 2


def test_every_right_answer_about_the_chinese_contract_is_found_on_its_page(chinese: Document) -> None:
    right = yaml.safe_load((SAMPLES / "answers-zh.yaml").read_text("utf-8"))["answers"]
    index = DocumentIndex(chinese.text, chinese.page_starts)

    found = {question_id: index.find(answer["answer"]) for question_id, answer in right.items()}

    assert {question_id: [evidence.page] for question_id, evidence in found.items() if evidence} == {
        question_id: answer["pages"] for question_id, answer in right.items()
    }
    assert [question.question_id for question in load_questions([SAMPLES / "checklist-zh.yaml"], [])] == [*right]


def test_the_chinese_contract_is_cut_where_its_clauses_begin(chinese: Document) -> None:
    sections = cut_sections(chinese.text, count_tokens=len, max_tokens=300, overlap_tokens=20)

    assert len(sections) > 4
    # With an overlap a section begins a little earlier, at a line; it ends where a clause begins.
    assert all(chinese.text[section.stop :].startswith(("第", "（")) for section in sections[:-1])
