from difflib import SequenceMatcher
from pathlib import Path

import pytest

from pipeline.documents import Document, read_documents
from pipeline.errors import (
    DocumentError,
    EmptyDocument,
    EncryptedDocument,
    NoTextLayer,
    UnsupportedType,
)
from tests.pipeline.made_files import LIMITS, read

REAL_FILES: dict[str, type[DocumentError] | int] = {
    "DA-619p.pdf": 619,
    "copy-protected.pdf": 2,
    "development-agreement-23p.pdf": 23,
    "development-agreement-23p.txt": 1,
    "docx-hdrftr.docx": 1,
    "docx-tables.docx": 1,
    "docx_comments.docx": 1,
    "docx_lists.docx": 3,
    "empty.txt": EmptyDocument,
    "fake-text-all-whitespace.txt": EmptyDocument,
    "fake-text-utf-16-be.txt": 1,
    "fake-text-utf-16.txt": 1,
    "fake.doc": UnsupportedType,
    "habibi.pdf": 1,
    "korean-text-with-tables.pdf": 1,
    "loremipsum-flat.pdf": NoTextLayer,
    "multi-column-2p.pdf": 2,
    "page-breaks.docx": 5,
    "password.pdf": EncryptedDocument,
    "simple.docx": 1,
    "textbox.docx": 1,
    "unit_test_headers_numbered.docx": 2,
    "word_tables.docx": 1,
}


@pytest.mark.shared_data
def test_every_real_file_gives_its_pages_or_its_error(shared_data: Path) -> None:
    paths = [shared_data / "files" / name for name in REAL_FILES]

    outcomes = [outcome for _, outcome in read_documents(paths, limits=LIMITS, workers=4)]

    found = [outcome.num_pages if isinstance(outcome, Document) else type(outcome) for outcome in outcomes]
    assert dict(zip(REAL_FILES, found, strict=True)) == REAL_FILES


@pytest.mark.shared_data
def test_every_real_contract_is_read_and_copies_are_one_document(shared_data: Path) -> None:
    paths = sorted((shared_data / "contracts").glob("*/*.txt"))

    outcomes = [outcome for _, outcome in read_documents(paths, limits=LIMITS, workers=4)]

    documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
    assert len(documents) == len(paths) == 55
    assert len({document.document_id for document in documents}) == len({path.read_bytes() for path in paths})
    assert not any("<PAGE>" in document.text for document in documents)


@pytest.mark.shared_data
def test_a_real_pdf_gives_the_words_that_people_typed_off_it_in_order(shared_data: Path) -> None:
    typed, extracted = (
        read(shared_data / "files" / f"development-agreement-23p.{suffix}").text.split() for suffix in ("txt", "pdf")
    )

    matches = SequenceMatcher(None, typed, extracted, autojunk=False).get_matching_blocks()

    assert sum(match.size for match in matches) / len(typed) > 0.99
    assert {"non-payment", "non-performance"} <= set(extracted)


@pytest.mark.shared_data
def test_a_real_right_to_left_word_is_in_reading_order(shared_data: Path) -> None:
    assert "حَبيبي" in read(shared_data / "files/habibi.pdf").text
