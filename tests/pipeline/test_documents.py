import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import docx
import pytest
from PIL import Image
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas

from pipeline.documents import Document, ParseLimits, read_document, read_documents, reader
from pipeline.errors import (
    DOCUMENT_ERRORS,
    DocumentError,
    EmptyDocument,
    EncryptedDocument,
    MissingFile,
    NoTextLayer,
    ParseLimitExceeded,
    UnreadableDocument,
    UnsupportedType,
)

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_DATA = Path(os.environ.get("PLATEMAKER_SHARED_DATA", REPOSITORY / "../shared/data"))
LIMITS = ParseLimits()
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STRICT_WORD = "http://purl.oclc.org/ooxml/wordprocessingml/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
LIMITATION = "The Licensee shall pay the fee within thirty days of the invoice, as set out in Schedule 2. " * 3


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder of real documents is not here; set PLATEMAKER_SHARED_DATA to use yours")
    return SHARED_DATA


def read(path: Path) -> Document:
    return read_document(path, limits=LIMITS)


def pages_of(document: Document) -> list[str]:
    bounds = pairwise([*document.page_starts, len(document.text)])
    return [document.text[start:end].removesuffix("\n") for start, end in bounds]


def text_file(folder: Path, content: bytes | str, name: str = "contract.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pdf_file(folder: Path, *pages: Callable[[Canvas], object], encrypt: StandardEncryption | None = None) -> Path:
    path = folder / "contract.pdf"
    canvas = Canvas(str(path), encrypt=encrypt)
    for draw in pages:
        draw(canvas)
        canvas.showPage()
    canvas.save()
    return path


def lines(*texts: str) -> Callable[[Canvas], None]:
    def draw(canvas: Canvas) -> None:
        for index, text in enumerate(texts):
            canvas.drawString(72, 700 - 14 * index, text)

    return draw


def scan(canvas: Canvas) -> None:
    picture = io.BytesIO()
    Image.new("L", (60, 80), 200).save(picture, "png")
    canvas.drawImage(ImageReader(picture), 0, 0, *canvas._pagesize)


def stamped_scan(canvas: Canvas) -> None:
    scan(canvas)
    canvas.drawString(20, 20, "Envelope 7B0F-22")


def raw_pdf_file(folder: Path, content: bytes, meanings: dict[str, str]) -> Path:
    """A page whose glyphs stand for other characters, as in fonts of other scripts."""
    pairs = "\n".join(f"<{ord(code):02X}> <{text.encode('utf-16-be').hex()}>" for code, text in meanings.items())
    cmap = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /X def /CMapType 2 def\n"
        f"1 begincodespacerange <00> <FF> endcodespacerange {len(meanings)} beginbfchar\n{pairs}\n"
        "endbfchar endcmap end end"
    ).encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
        b"<</Type/Font/Subtype/Type1/BaseFont/Courier/ToUnicode 6 0 R>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(cmap), cmap),
    ]
    body = b"%PDF-1.4\n"
    table = b"0000000000 65535 f \n"
    for number, object_ in enumerate(objects, 1):
        table += b"%010d 00000 n \n" % len(body)
        body += b"%d 0 obj\n%s\nendobj\n" % (number, object_)
    trailer = b"trailer<</Size 7/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % len(body)
    return text_file(folder, body + b"xref\n0 7\n" + table + trailer, "contract.pdf")


def docx_file(folder: Path, body: str, *, namespace: str = WORD, **parts: str) -> Path:
    """A Word file of this body; each further part is related to it by its name."""
    path = folder / "contract.docx"
    rels = '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{}</Relationships>'
    rel = '<Relationship Id="{0}" Type="{1}/{2}" Target="{3}"/>'
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        main = rel.format("main", OFFICE, "officeDocument", "word/document.xml")
        archive.writestr("_rels/.rels", rels.format(main))
        related = [rel.format(name, OFFICE, name.rstrip("0123456789"), f"{name}.xml") for name in parts]
        archive.writestr("word/_rels/document.xml.rels", rels.format("".join(related)))
        for name, content in {
            "document": f"<w:document><w:body>{body}</w:body></w:document>",
            **parts,
        }.items():
            root, rest = content.split(">", 1)
            spaces = f'xmlns:w="{namespace}" xmlns:r="{OFFICE}" xmlns:mc="urn:mc" xmlns:v="urn:v" xmlns:wps="urn:wps"'
            archive.writestr(f"word/{name}.xml", f"{root} {spaces}>{rest}")
    return path


def p(*runs: str, style: str = "", level: int | None = None, list_id: int = 1, more: str = "") -> str:
    numbering = "" if level is None else (f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{list_id}"/></w:numPr>')
    named = f'<w:pStyle w:val="{style}"/>' if style else ""
    content = "".join(run if run.startswith("<") else f"<w:r><w:t>{run}</w:t></w:r>" for run in runs)
    return f"<w:p><w:pPr>{named}{numbering}{more}</w:pPr>{content}</w:p>"


def numbering_part(*levels: tuple[str, str], more: str = "") -> str:
    defined = "".join(
        f'<w:lvl w:ilvl="{index}"><w:start w:val="1"/><w:numFmt w:val="{number_format}"/>'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
        for index, (number_format, text) in enumerate(levels)
    )
    return (
        f'<w:numbering><w:abstractNum w:abstractNumId="7">{defined}</w:abstractNum>'
        f'<w:num w:numId="1"><w:abstractNumId w:val="7"/></w:num>{more}</w:numbering>'
    )


# Identity and the page map


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


# What cannot be read


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
    "unknown type": (lambda folder: text_file(folder, "<html>", "contract.html"), UnsupportedType),
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    path = text_file(tmp_path, "text")
    path.chmod(0)

    with pytest.raises(UnreadableDocument, match="Permission denied"):
        read(path)


# Limits, and the process that parses


def child_running(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def test_a_parser_that_hangs_is_ended_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_file(tmp_path, "text")
    script = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1] + '.pid', 'w', 1)); time.sleep(60)"
    monkeypatch.setattr(reader, "CHILD_COMMAND", child_running(script))
    started = time.monotonic()

    with pytest.raises(ParseLimitExceeded, match="limit of 1 s for time"):
        read_document(path, limits=ParseLimits(time_s=1))

    assert time.monotonic() - started < 30
    pid = int((tmp_path / "contract.txt.pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_parser_that_spins_without_a_parent_is_ended_by_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "from pipeline.documents.child import set_limits; set_limits(memory_bytes=2**30, time_s=1)\nwhile 1: pass"
    monkeypatch.setattr(reader, "CHILD_COMMAND", child_running(script))

    with pytest.raises(ParseLimitExceeded) as caught:
        read(text_file(tmp_path, "text"))

    assert caught.value.resource == "time"


def test_a_parser_that_eats_memory_is_stopped_at_the_memory_limit(tmp_path: Path) -> None:
    path = text_file(tmp_path, b"word " * (30 * 2**20))

    with pytest.raises(ParseLimitExceeded, match="limit of 256 MiB for memory"):
        read_document(path, limits=ParseLimits(memory_bytes=256 * 2**20))


def test_a_file_over_the_size_limit_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ParseLimitExceeded, match="file size"):
        read_document(text_file(tmp_path, "12345"), limits=ParseLimits(max_file_bytes=4))


@pytest.mark.parametrize(
    ("script", "expected", "message"),
    [
        ("import os; os.abort()", UnreadableDocument, "crashed with SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", ParseLimitExceeded, "memory"),
        ("import sys; sys.exit(3)", UnreadableDocument, "status 3"),
        ("print('half an ans')", UnreadableDocument, "no answer"),
    ],
)
def test_a_parser_that_dies_is_one_documents_error(
    script: str, expected: type[DocumentError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CHILD_COMMAND", child_running(script))

    with pytest.raises(expected, match=message):
        read(text_file(tmp_path, "text"))


def test_the_parsing_process_is_told_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATEMAKER_DATABASE_URL", "postgresql://me:hunter2@db/platemaker")
    script = (
        "import json, os; text = json.dumps(dict(os.environ));"
        "print(json.dumps({'text': text, 'page_starts': [0], 'pages_without_text': [], 'kind': 'text'}))"
    )
    monkeypatch.setattr(reader, "CHILD_COMMAND", child_running(script))

    environment = read(text_file(tmp_path, "text")).text

    assert "PYTHONUTF8" in environment
    assert "hunter2" not in environment


def test_modules_in_the_users_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "pipeline", "charset_normalizer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('trap')")
    monkeypatch.chdir(tmp_path)
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


# Text files


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8", "Müller pays € 5"),
        ("utf-8-sig", "Müller pays € 5"),
        ("utf-16", "Müller pays € 5"),
        ("utf-32", "Müller pays € 5"),
        ("utf-16-le", "Müller pays 5 and more for it"),
        ("utf-16-be", "Müller pays 5 and more for it"),
        ("utf-32-le", "Müller pays 5 and more for it"),
        ("utf-32-be", "Müller pays 5 and more for it"),
        ("cp1252", "the “Licensee” shall – under § 4 – pay the fee of € 100 to Müller & Co. each quarter"),
        (
            "gb18030",
            "本协议由甲方与乙方于北京签订。双方经友好协商，就软件许可事宜达成如下条款，以资共同遵守。" * 4,
        ),
        ("cp1251", "Настоящий договор заключён между Лицензиаром и Лицензиатом в городе Москве. " * 4),
    ],
)
def test_text_is_read_in_the_encoding_it_was_written_in(encoding: str, text: str, tmp_path: Path) -> None:
    assert read(text_file(tmp_path, text.encode(encoding))).text == text.strip()


def test_two_encodings_pasted_together_are_both_read(tmp_path: Path) -> None:
    data = (LIMITATION + "“one”").encode() + (LIMITATION + "“two”").encode("cp1252")

    assert read(text_file(tmp_path, data)).text == f"{LIMITATION}“one”{LIMITATION}“two”"


def test_nul_characters_are_dropped(tmp_path: Path) -> None:
    assert read(text_file(tmp_path, LIMITATION + "fee\0s\0 due")).text == f"{LIMITATION}fees due"


def test_text_pages_end_at_form_feeds_and_at_the_marks_of_filings(tmp_path: Path) -> None:
    text = "<PAGE>   1\r\none <PAGE> more\r\n  <PAGE>\r\ntwo\f\n<PAGE> 3\nthree\f\ffive\f"

    assert pages_of(read(text_file(tmp_path, text))) == ["one <PAGE> more", "two", "three", "", "five"]


@pytest.mark.parametrize("name", ["a b, c: d.txt", "合同.text", "-rf.md", "{path}.txt", "B.TXT"])
def test_any_file_name_will_do(name: str, tmp_path: Path) -> None:
    assert read(text_file(tmp_path, "text", name)).text == "text"


def test_the_first_bytes_decide_over_the_name(tmp_path: Path) -> None:
    path = pdf_file(tmp_path, lines("text")).rename(tmp_path / "contract.txt")

    assert read(path).kind == "pdf"


# PDF


def test_pdf_text_is_found_on_its_page(tmp_path: Path) -> None:
    document = read(pdf_file(tmp_path, *(lines(f"This is page {page}.") for page in range(1, 13))))

    assert document.num_pages == 12
    assert document.page_of(document.text.index("page 11")) == 11
    assert document.pages_without_text == ()


def test_pages_that_are_scans_or_blank_are_named(tmp_path: Path) -> None:
    document = read(pdf_file(tmp_path, lines("text"), scan, lines("more"), stamped_scan, lines()))

    assert document.pages_without_text == (2, 4, 5)
    assert document.page_of(document.text.index("more")) == 3


def test_what_was_filled_into_a_pdf_form_is_read(tmp_path: Path) -> None:
    def form(canvas: Canvas) -> None:
        canvas.drawString(72, 700, "Name of the tenant:")
        canvas.acroForm.textfield(name="tenant", value="Jane Roe", x=200, y=690, width=200, height=20)

    assert "Jane Roe" in read(pdf_file(tmp_path, form)).text


def test_a_pdf_that_only_forbids_changes_is_read(tmp_path: Path) -> None:
    protected = StandardEncryption("", ownerPassword="owner", canModify=0)

    assert read(pdf_file(tmp_path, lines("text"), encrypt=protected)).text == "text"


def test_a_word_broken_over_two_pdf_lines_is_one_word(tmp_path: Path) -> None:
    document = read(pdf_file(tmp_path, lines("all rights under this agree-", "ment shall end, see Annex-", "2.")))

    assert document.text == "all rights under this agreement shall end, see Annex-2."


def test_a_right_to_left_line_is_in_reading_order_with_its_ligatures(tmp_path: Path) -> None:
    drawn = b"BT /F 12 Tf 100 700 Td (dcba) Tj ET"  # from the left, as programs draw it
    path = raw_pdf_file(tmp_path, drawn, {"a": "س", "b": "لا", "c": "م", "d": "ي"})

    assert read(path).text == "سلامي"


# Word


def test_word_text_boxes_are_read_once_after_their_paragraph(tmp_path: Path) -> None:
    box = f"<w:txbxContent>{p('boxed')}</w:txbxContent>"
    drawing = (
        f"<mc:AlternateContent><mc:Choice><wps:txbx>{box}</wps:txbx></mc:Choice>"
        f"<mc:Fallback><v:textbox>{box}</v:textbox></mc:Fallback></mc:AlternateContent>"
    )

    assert read(docx_file(tmp_path, p("be", f"<w:r>{drawing}</w:r>", "fore") + p("after"))).text == (
        "before\nboxed\nafter"
    )


def test_word_changes_are_accepted_and_comments_and_hidden_text_left_out(tmp_path: Path) -> None:
    body = p(
        "pay ",
        "<w:del><w:r><w:delText>30</w:delText></w:r></w:del>",
        "<w:ins><w:r><w:t>60</w:t></w:r></w:ins>",
        "<w:moveFrom><w:r><w:t>gone</w:t></w:r></w:moveFrom>",
        "<w:r><w:rPr><w:vanish/></w:rPr><w:t>hidden</w:t></w:r>",
        '<w:commentRangeStart w:id="0"/>',
        " days",
        '<w:r><w:commentReference w:id="0"/></w:r>',
    )
    comments = f'<w:comments><w:comment w:id="0">{p("too long!")}</w:comment></w:comments>'

    assert read(docx_file(tmp_path, body, comments=comments)).text == "pay 60 days"


def test_a_deleted_clause_takes_no_number_and_a_deleted_end_joins_paragraphs(tmp_path: Path) -> None:
    ended = "<w:rPr><w:del/></w:rPr>"
    body = (
        p("Term", level=0)
        + p("<w:del><w:r><w:delText>Penalty</w:delText></w:r></w:del>", level=0, more=ended)
        + p("Gov", level=0, more=ended)
        + p("erning law", level=0)
    )

    text = read(docx_file(tmp_path, body, numbering=numbering_part(("decimal", "%1.")))).text

    assert text == "1. Term\n2. Governing law"


def test_clause_numbers_are_those_that_word_shows(tmp_path: Path) -> None:
    numbering = numbering_part(
        ("upperRoman", "Article %1"),
        ("decimal", "%1.%2"),
        ("lowerLetter", "(%3)"),
        ("lowerRoman", "(%4)"),
        ("bullet", "\uf0b7"),
        more=(
            '<w:num w:numId="2"><w:abstractNumId w:val="7"/><w:lvlOverride w:ilvl="0">'
            '<w:startOverride w:val="27"/><w:lvl w:ilvl="0"><w:start w:val="27"/><w:numFmt w:val="upperLetter"/>'
            '<w:lvlText w:val="Annex %1:"/></w:lvl></w:lvlOverride></w:num>'
        ),
    ).replace('<w:lvl w:ilvl="1">', '<w:lvl w:ilvl="1"><w:isLgl/>')
    levels = [0, 1, 2, 2, 3, 3, 1, 2, 4, 0, 1]
    body = "".join(p("x", level=level) for level in levels) + p("x", level=0, list_id=2) + p("x", level=0, list_id=0)

    assert read(docx_file(tmp_path, body, numbering=numbering)).text.split("\n") == [
        *("Article I x", "1.1 x", "(a) x", "(b) x", "(i) x", "(ii) x", "1.2 x", "(a) x", "• x"),
        *("Article II x", "2.1 x", "Annex AA: x", "x"),
    ]


def test_clause_numbers_come_from_styles_too(tmp_path: Path) -> None:
    styles = (
        '<w:styles><w:style w:type="paragraph" w:styleId="Clause"><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr>'
        '</w:pPr></w:style><w:style w:type="paragraph" w:styleId="Sub"><w:basedOn w:val="Clause"/><w:pPr><w:numPr>'
        '<w:ilvl w:val="1"/></w:numPr></w:pPr></w:style></w:styles>'
    )
    numbering = numbering_part(("chineseCountingThousand", "第%1条"), ("decimalZero", "%2)"))
    body = p("甲", style="Clause") + p("乙", style="Sub") + p("丙", style="Clause")

    assert read(docx_file(tmp_path, body, numbering=numbering, styles=styles)).text == "第一条 甲\n01) 乙\n第二条 丙"


def test_word_tables_are_lines_of_cells_and_layout_tables_are_text(tmp_path: Path) -> None:
    def table(*rows: tuple[str, ...]) -> str:
        cells = ("".join(f"<w:tc>{cell}</w:tc>" for cell in row) for row in rows)
        return f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in cells)}</w:tbl>"

    deleted = "<w:tr><w:trPr><w:del/></w:trPr><w:tc><w:p><w:r><w:t>gone</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
    body = table((p("Fee"), p("100") + p("USD")), (p("Term"), p(""))).replace("</w:tbl>", deleted)
    layout = table((p("One.") + p("Two."),))

    assert read(docx_file(tmp_path, body + layout)).text == "Fee | 100 USD\nTerm |\nOne.\nTwo."


def test_word_headers_stand_first_footers_last_and_notes_after_their_paragraph(tmp_path: Path) -> None:
    section = (
        '<w:sectPr><w:headerReference r:id="header1"/><w:headerReference r:id="header2"/>'
        '<w:footerReference r:id="footer1"/></w:sectPr>'
    )
    body = p("Fees", '<w:r><w:footnoteReference w:id="2"/><w:endnoteReference w:id="5"/></w:r>', " due") + p("End")
    path = docx_file(
        tmp_path,
        body + section,
        header1=f"<w:hdr>{p('Draft')}</w:hdr>",
        header2=f"<w:hdr>{p('Draft')}</w:hdr>",
        footer1=f"<w:ftr>{p('Confidential')}</w:ftr>",
        footnotes=f'<w:footnotes><w:footnote w:id="2">{p("Net of tax.")}</w:footnote></w:footnotes>',
        endnotes=f'<w:endnotes><w:endnote w:id="5">{p("See Annex.")}</w:endnote></w:endnotes>',
    )

    assert read(path).text == "Draft\nFees due\n[1] Net of tax.\n[i] See Annex.\nEnd\nConfidential"


def test_word_fields_show_their_result_and_controls_their_content(tmp_path: Path) -> None:
    def mark(kind: str, content: str = "") -> str:
        return f'<w:r><w:fldChar w:fldCharType="{kind}">{content}</w:fldChar></w:r>'

    checked = '<w:ffData><w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox></w:ffData>'
    body = p(
        mark("begin"),
        "<w:r><w:instrText>IF </w:instrText></w:r>",
        "<w:r><w:t>operand</w:t></w:r>",
        mark("separate"),
        "Clause 4",
        mark("end"),
        "<w:sdt><w:sdtPr/><w:sdtContent><w:r><w:t> agreed </w:t></w:r></w:sdtContent></w:sdt>",
        mark("begin", checked) + mark("end"),
        '<w:r><w:sym w:font="Wingdings" w:char="F0A8"/><w:noBreakHyphen/><w:t>x</w:t><w:tab/><w:t>y</w:t></w:r>',
    )
    control = f"<w:sdt><w:sdtContent>{p('Party B')}</w:sdtContent></w:sdt>"

    assert read(docx_file(tmp_path, body + control)).text == "Clause 4 agreed ☒☐-x y\nParty B"


def test_word_pages_break_where_author_and_layout_broke_them(tmp_path: Path) -> None:
    hard, laid_out = '<w:r><w:br w:type="page"/></w:r>', "<w:r><w:lastRenderedPageBreak/></w:r>"
    body = (
        p("one", hard)
        + p(laid_out, "two, next")
        + p(laid_out, "three", level=0)
        + p("four", more="<w:pageBreakBefore/>")
        + p("four still", more='<w:sectPr><w:type w:val="nextPage"/></w:sectPr>')
        + p("four again", more='<w:sectPr><w:type w:val="continuous"/></w:sectPr>')
        + p("five")
        + "<w:sectPr/>"
    )

    pages = pages_of(read(docx_file(tmp_path, body, numbering=numbering_part(("decimal", "%1.")))))

    assert pages == ["one", "two, next", "1. three", "four\nfour still\nfour again", "five"]


def test_word_files_of_the_strict_kind_are_read(tmp_path: Path) -> None:
    assert read(docx_file(tmp_path, p("text"), namespace=STRICT_WORD)).text == "text"


def test_a_file_that_python_docx_wrote_is_read(tmp_path: Path) -> None:
    written = docx.Document()
    written.add_heading("Lease", level=1)
    written.add_paragraph("First", style="List Number")
    written.add_paragraph("Second", style="List Number")
    written.add_page_break()
    written.add_paragraph("Point", style="List Bullet")
    path = tmp_path / "lease.docx"
    written.save(str(path))

    assert pages_of(read(path)) == ["Lease\n1. First\n2. Second", "• Point"]


# Real documents

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
