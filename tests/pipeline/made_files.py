"""Contracts of every kind that the tests make, and how they read them."""

import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from PIL import Image
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas

from pipeline.documents import Document, ParseLimits, read_document

LIMITS = ParseLimits()
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STRICT_WORD = "http://purl.oclc.org/ooxml/wordprocessingml/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
LIMITATION = "The Licensee shall pay the fee within thirty days of the invoice, as set out in Schedule 2. " * 3


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
