import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from reportlab.lib.pdfencrypt import StandardEncryption

from pipeline.documents import Document, ParseLimits, parser_pool, read_document, read_documents
from pipeline.errors import (
    DOCUMENT_ERRORS,
    DocumentError,
    EmptyDocument,
    EmptyFolder,
    EncryptedDocument,
    MissingFile,
    NoTextLayer,
    ParseLimitExceeded,
    UnreadableDocument,
    UnsupportedType,
)
from tests.pipeline.made_files import (
    LIMITATION,
    LIMITS,
    docx_file,
    lines,
    p,
    pdf_file,
    read,
    scan,
    stamped_scan,
    text_file,
)

REPOSITORY = Path(__file__).resolve().parents[2]
ANSWER = {
    "text": "text",
    "page_starts": [0],
    "pages_without_text": [],
    "kind": "text",
    "parts": [],
    "notes": [],
    "removed": [],
}
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)


def test_one_text_is_one_document_under_every_name_and_type(tmp_path: Path) -> None:
    text = text_file(tmp_path, "First.\r\nSecond \u00a0 line.", "a.txt")
    copy = text_file(tmp_path, b"\xef\xbb\xbfFirst.\nSecond line.\n\n", "other name.MD")
    word = docx_file(tmp_path, p("First.") + p("Second line."))
    pdf = pdf_file(tmp_path, lines("First.", "Second line."))
    paged = text_file(tmp_path, "First.\fSecond line.", "paged.txt")

    documents = [read(path) for path in (text, copy, word, pdf, paged)]

    assert len({document.document_id for document in documents}) == 1
    assert [document.kind for document in documents] == ["text", "text", "docx", "pdf", "text"]


def test_another_text_is_another_document(tmp_path: Path) -> None:
    ids = {read(text_file(tmp_path, text)).document_id for text in ("30 days", "60 days", "30  days")}

    assert len(ids) == 2


def test_an_offset_outside_the_text_has_no_page() -> None:
    document = Document(text="abc", page_starts=(0,), pages_without_text=(), kind="text")

    assert document.page_of(2) == 1
    for offset in (-1, 3):
        with pytest.raises(IndexError):
            document.page_of(offset)


def entity_bomb(folder: Path) -> Path:
    path = folder / "contract.docx"
    with ZipFile(path, "w") as archive:
        archive.writestr("_rels/.rels", "<Relationships/>")
        archive.writestr("word/document.xml", '<!DOCTYPE d [<!ENTITY a "aa">]><d><body>&a;</body></d>')
    return path


def zip_bomb(folder: Path) -> Path:
    path = folder / "contract.docx"
    with ZipFile(path, "w", ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("_rels/.rels", "<Relationships/>")
        with archive.open("word/document.xml", "w") as part:
            for _ in range(257):
                part.write(bytes(2**20))
    assert path.stat().st_size < 2 * 2**20
    return path


def workbook(folder: Path) -> Path:
    path = folder / "contract.docx"
    with ZipFile(path, "w") as archive:
        archive.writestr("xl/workbook.xml", "<workbook/>")
    return path


def truncated(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def cut_update(folder: Path) -> Path:
    """Two saves in one file, the second cut off: repaired, it would give the first, outdated text."""
    path = pdf_file(folder, lines("The fee is 100."))
    path.write_bytes(path.read_bytes() + b"9 0 obj\n<</Amended true>>\n" + bytes(range(1, 200)) * 40)
    return path


def made_fifo(folder: Path) -> Path:
    path = folder / "contract.txt"
    os.mkfifo(path)
    return path


def made_folder(folder: Path) -> Path:
    path = folder / "contract.pdf"
    path.mkdir()
    return path


UNREADABLE: dict[str, tuple[Callable[[Path], Path], type[DocumentError]]] = {
    "absent": (lambda folder: folder / "contract.txt", MissingFile),
    "impossible name": (lambda folder: folder / "contract\0.txt", MissingFile),
    "file as folder": (lambda folder: text_file(folder, "x") / "contract.txt", MissingFile),
    "folder": (made_folder, UnsupportedType),
    "pipe": (made_fifo, UnsupportedType),
    "no bytes": (lambda folder: text_file(folder, b""), EmptyDocument),
    "blanks": (lambda folder: text_file(folder, " \n\t\r\n\f \u200b\u00a0"), EmptyDocument),
    "empty Word file": (lambda folder: docx_file(folder, p("")), EmptyDocument),
    "unknown type": (lambda folder: text_file(folder, "a,b", "contract.csv"), UnsupportedType),
    "no type": (lambda folder: text_file(folder, "some text", "contract"), UnsupportedType),
    "old Word file": (
        lambda folder: text_file(folder, OLE + "WordDocument".encode("utf-16-le"), "contract.doc"),
        UnsupportedType,
    ),
    "old Word file, renamed": (
        lambda folder: text_file(folder, OLE + "WordDocument".encode("utf-16-le"), "contract.docx"),
        UnsupportedType,
    ),
    "old Excel file": (lambda folder: text_file(folder, OLE, "contract.xls"), UnsupportedType),
    "workbook": (workbook, UnsupportedType),
    "picture named text": (lambda folder: text_file(folder, b"\x89PNG\r\n"), UnsupportedType),
    "rich text": (lambda folder: text_file(folder, b"{\\rtf1 hello}"), UnsupportedType),
    "encrypted Word file": (
        lambda folder: text_file(folder, OLE + "EncryptedPackage".encode("utf-16-le"), "contract.docx"),
        EncryptedDocument,
    ),
    "Word file in OLE": (lambda folder: text_file(folder, OLE, "contract.docx"), EncryptedDocument),
    "encrypted PDF": (
        lambda folder: pdf_file(folder, lines("secret"), encrypt=StandardEncryption("open sesame")),
        EncryptedDocument,
    ),
    "scan": (lambda folder: pdf_file(folder, scan, scan), NoTextLayer),
    "stamped scan": (lambda folder: pdf_file(folder, stamped_scan), NoTextLayer),
    "blank PDF": (lambda folder: pdf_file(folder, lines()), NoTextLayer),
    "truncated PDF": (
        lambda folder: truncated(pdf_file(folder, lines("some text")), 0.5),
        UnreadableDocument,
    ),
    "PDF without its last save": (cut_update, UnreadableDocument),
    "text named PDF": (lambda folder: text_file(folder, "404 not found", "contract.pdf"), UnreadableDocument),
    "truncated Word file": (
        lambda folder: truncated(docx_file(folder, p(LIMITATION)), 0.5),
        UnreadableDocument,
    ),
    "broken XML": (lambda folder: docx_file(folder, "<w:p>"), UnreadableDocument),
    "XML entities": (entity_bomb, UnreadableDocument),
    "bottomless XML": (
        lambda folder: docx_file(folder, "<w:ins>" * 5000 + "</w:ins>" * 5000),
        UnreadableDocument,
    ),
    "second file inside": (lambda folder: docx_file(folder, p("text") + "<w:altChunk/>"), UnreadableDocument),
    "surprise": (
        lambda folder: docx_file(folder, p('<w:r><w:sym w:char="SECRET"/></w:r>')),
        UnreadableDocument,
    ),
    "random bytes": (lambda folder: text_file(folder, random.Random(1).randbytes(9000)), UnreadableDocument),
    "zip bomb": (zip_bomb, ParseLimitExceeded),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_says_so_in_one_sentence_by_its_own_type(case: str, tmp_path: Path) -> None:
    make, expected = UNREADABLE[case]
    path = make(tmp_path)

    with pytest.raises(DocumentError) as caught:
        read(path)

    assert type(caught.value) is expected
    assert caught.value.path == path
    message = str(caught.value)
    assert path.name in message
    assert message.endswith(".") and "\n" not in message and "{" not in message
    assert "SECRET" not in message


def test_a_document_errors_code_and_details_give_it_back(tmp_path: Path) -> None:
    path = tmp_path / "contract.pdf"
    errors: list[DocumentError] = [
        MissingFile(path),
        EmptyFolder(path),
        EmptyDocument(path),
        UnsupportedType(path, found="an image"),
        EncryptedDocument(path),
        NoTextLayer(path, num_pages_without_text=2, num_pages=2),
        UnreadableDocument(path, reason="damaged"),
        ParseLimitExceeded(path, resource="memory", limit=2048, unit="MiB"),
    ]

    copies = [DOCUMENT_ERRORS[error.code](path, **json.loads(json.dumps(error.details))) for error in errors]

    assert [str(copy) for copy in copies] == [str(error) for error in errors]
    assert {type(copy) for copy in copies} == set(DOCUMENT_ERRORS.values())


def test_an_old_word_file_is_told_what_to_become(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedType, match=r"old Word file .* save it as \.docx or PDF"):
        read(text_file(tmp_path, OLE, "contract.doc"))


def test_a_scan_is_told_by_its_number_of_pages(tmp_path: Path) -> None:
    with pytest.raises(NoTextLayer, match="3 of its 3 pages have no text; run OCR") as caught:
        read(pdf_file(tmp_path, scan, stamped_scan, lines()))

    assert caught.value.num_pages_without_text == 3


@pytest.mark.parametrize("name", ["a b, c: d.txt", "合同.text", "-rf.md", "{path}.txt", "B.TXT"])
def test_any_file_name_will_do(name: str, tmp_path: Path) -> None:
    assert read(text_file(tmp_path, "text", name)).text == "text"


def test_the_first_bytes_decide_over_the_name(tmp_path: Path) -> None:
    path = pdf_file(tmp_path, lines("text")).rename(tmp_path / "contract.txt")

    assert read(path).kind == "pdf"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    path = text_file(tmp_path, "text")
    path.chmod(0)

    with pytest.raises(UnreadableDocument, match="Permission denied"):
        read(path)


@pytest.fixture
def parsers_that(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes the parsing processes do something else in place of parsing `path` from the open `file`."""

    def use(body: str) -> None:
        script = "\n".join(
            [
                "import json, os, sys, time, pipeline.documents.parser_server as server",
                "def answer_to(request, file):",
                "    path = request['path']",
                f"    {body}",
                "server.answer_to = answer_to",
                "server.main()",
            ]
        )
        monkeypatch.setattr(parser_pool, "SERVER_COMMAND", (sys.executable, "-c", script))
        parser_pool.close_idle()

    yield use
    parser_pool.close_idle()


WRITE_PID = "print(os.getpid(), file=open(path + '.pid', 'w', 1))"


def test_a_parser_that_hangs_is_ended_at_the_time_limit(tmp_path: Path, parsers_that: Callable[[str], None]) -> None:
    path = text_file(tmp_path, "text")
    parsers_that(f"{WRITE_PID}; time.sleep(60)")
    started = time.monotonic()

    with pytest.raises(ParseLimitExceeded, match="limit of 1 s for time"):
        read_document(path, limits=ParseLimits(time_s=1))

    assert time.monotonic() - started < 30
    pid = int((tmp_path / "contract.txt.pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_parser_that_spins_without_its_server_is_ended_by_the_kernel(tmp_path: Path) -> None:
    script = (
        "from pipeline.documents.parser_server import set_limits; set_limits(memory_bytes=2**30, time_s=1)\n"
        "while 1: pass"
    )

    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False)

    assert ended.returncode == -signal.SIGXCPU


def test_a_parser_that_eats_memory_is_stopped_at_the_memory_limit(tmp_path: Path) -> None:
    path = text_file(tmp_path, b"word " * (30 * 2**20))

    with pytest.raises(ParseLimitExceeded, match="limit of 256 MiB for memory"):
        read_document(path, limits=ParseLimits(memory_bytes=256 * 2**20))


def test_a_file_over_the_size_limit_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ParseLimitExceeded, match="file size"):
        read_document(text_file(tmp_path, "12345"), limits=ParseLimits(max_file_bytes=4))


@pytest.mark.parametrize(
    ("body", "expected", "message"),
    [
        ("os.abort()", UnreadableDocument, "crashed with SIGABRT"),
        ("os.kill(os.getpid(), 9)", ParseLimitExceeded, "memory"),
        ("os.kill(os.getpid(), 24)", ParseLimitExceeded, "time"),
        ("os._exit(3)", UnreadableDocument, "status 3"),
        ("os._exit(0)", UnreadableDocument, "no answer"),
        ("os.kill(os.getppid(), 9)", UnreadableDocument, "no answer"),
    ],
)
def test_a_parser_that_dies_is_one_documents_error_and_the_next_is_read(
    body: str,
    expected: type[DocumentError],
    message: str,
    tmp_path: Path,
    parsers_that: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsers_that(body + " if 'bad' in path else None; return " + repr(ANSWER))

    with pytest.raises(expected, match=message):
        read(text_file(tmp_path, "text", "bad.txt"))

    assert read(text_file(tmp_path, "text", "good.txt")).text == "text"


def test_the_process_of_one_file_knows_nothing_of_the_file_before(
    tmp_path: Path, parsers_that: Callable[[str], None]
) -> None:
    parsers_that(
        "server.seen = getattr(server, 'seen', '') + path; return " + repr(ANSWER) + " | {'text': server.seen}"
    )

    texts = [read(text_file(tmp_path, "text", name)).text for name in ("a.txt", "b.txt")]

    assert texts == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def test_the_parsing_process_is_told_no_secrets(
    tmp_path: Path, parsers_that: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLATEMAKER_DATABASE_URL", "postgresql://me:hunter2@db/platemaker")
    parsers_that("return " + repr(ANSWER) + " | {'text': json.dumps(dict(os.environ))}")

    environment = read(text_file(tmp_path, "text")).text

    assert "PYTHONUTF8" in environment
    assert "hunter2" not in environment


def test_modules_in_the_users_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "pipeline", "charset_normalizer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('trap')")
    monkeypatch.chdir(tmp_path)
    parser_pool.close_idle()
    Path("contract.txt").write_text("text")

    assert read(Path("contract.txt")).text == "text"


def test_importing_the_room_imports_no_parser_and_no_engine() -> None:
    script = "import sys, pipeline.documents; print(*{name.split('.')[0] for name in sys.modules})"
    listing = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    heavy = {"torch", "transformers", "celery", "pypdfium2", "defusedxml", "charset_normalizer", "pydantic"}
    assert not heavy & set(listing.stdout.split())


def test_many_documents_come_in_order_with_errors_in_their_place(tmp_path: Path) -> None:
    paths = [text_file(tmp_path, f"number {index}", f"{index}.txt") for index in range(6)]
    paths.insert(2, tmp_path / "absent.txt")

    outcomes = list(read_documents(paths, limits=LIMITS, workers=3))

    assert [index for index, _ in outcomes] == list(range(7))
    assert isinstance(outcomes[2][1], MissingFile)
    texts = [outcome.text for _, outcome in outcomes if isinstance(outcome, Document)]
    assert texts == [f"number {index}" for index in range(6)]


def test_many_documents_are_read_only_a_little_ahead(tmp_path: Path) -> None:
    path = text_file(tmp_path, "text")
    taken = 0

    def endless() -> Iterator[Path]:
        nonlocal taken
        while True:
            taken += 1
            yield path

    outcomes = read_documents(endless(), limits=LIMITS, workers=2)
    next(outcomes)
    assert taken <= 6
    outcomes.close()  # type: ignore[attr-defined]
