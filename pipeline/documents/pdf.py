import math
import re
from collections import Counter
from contextlib import closing
from itertools import groupby
from pathlib import PurePath
from typing import NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

from pipeline.documents.document import RawPages
from pipeline.documents.ocr import PageReader
from pipeline.documents.options import ReadOptions
from pipeline.errors import EncryptedDocument, NoTextLayer, UnreadableDocument, UnsupportedType

_HYPHEN = "\u0002"
_UNKNOWN = "\ufffe"  # pdfium's mark both for a line-end hyphen and for a glyph of unknown meaning
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_TAIL_BYTES = 4096
# pdfium gives the lines of a page whose text it would show turned so in the wrong order.
_MISREAD_ANGLE = 270
_ANGLE_SAMPLES = 32
# A scan with a stamp (a signing service's envelope number, a page number) is still a scan.
_STAMP_CHARACTERS = 100
_SCAN_AREA = 0.5


def read_pdf(path: PurePath, data: bytes, options: ReadOptions) -> RawPages:
    end = data.rstrip(b"\0\t\r\n ")[-_TAIL_BYTES:]
    if b"%%EOF" not in end and b"startxref" not in end:
        # pdfium may repair such a file and give an older or shorter document than was meant.
        raise UnreadableDocument(path, reason="the end of the file is missing")
    try:
        with pypdfium2.PdfDocument(data) as pdf:
            pages, without_text, recognised = _read_pages(path, pdf, options)
    except pypdfium2.PdfiumError as exc:
        if exc.err_code in (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY):
            raise EncryptedDocument(path) from exc
        raise UnreadableDocument(path, reason="it is damaged or not a PDF") from exc
    if len(without_text) == len(pages):
        raise NoTextLayer(path, num_pages_without_text=len(without_text), num_pages=len(pages))
    notes = [f"the text of page {page} was recognised from a picture (OCR)." for page in recognised]
    return RawPages(pages, tuple(without_text), notes=tuple(notes))


class _Pages(NamedTuple):
    texts: list[str]
    without_text: list[int]
    recognised: list[int]


def _read_pages(path: PurePath, pdf: pypdfium2.PdfDocument, options: ReadOptions) -> _Pages:
    form_type = pdf.get_formtype()
    if form_type == pdfium.FORMTYPE_XFA_FULL:
        found = "a form that only Adobe's programs can show (XFA)"
        raise UnsupportedType(path, found=found, save_as="an ordinary PDF, by printing it to a file")
    has_form = form_type != pdfium.FORMTYPE_NONE
    if has_form:
        pdf.init_forms()
    pages = _Pages([], [], [])
    recognise = PageReader().read if options.ocr else None
    for index in range(len(pdf)):
        if has_form:
            # What was filled in becomes part of the page, seen once the page is opened again.
            with closing(pdf[index]) as page:
                page.flatten()
        with closing(pdf[index]) as page:
            text = _page_text(page)
            if _has_no_text(page, text):
                seen = recognise(page) if recognise else ""
                (pages.recognised if seen else pages.without_text).append(index + 1)
                text = seen or text
        pages.texts.append(text)
    return pages


def _page_text(page: pypdfium2.PdfPage) -> str:
    with closing(page.get_textpage()) as textpage:
        angle = _text_angle(textpage)
        if (angle - page.get_rotation()) % 360 != _MISREAD_ANGLE:
            return _text(textpage)
    page.set_rotation(angle)
    with closing(page.get_textpage()) as textpage:
        return _text(textpage)


def _text_angle(textpage: pypdfium2.PdfTextPage) -> int:
    """How most text of the page is turned, in degrees against the clock."""
    num_characters = textpage.count_chars()
    step = max(1, num_characters // _ANGLE_SAMPLES)
    radians = (pdfium.FPDFText_GetCharAngle(textpage, index) for index in range(0, num_characters, step))
    angles = Counter(round(-math.degrees(angle) / 90) * 90 % 360 for angle in radians if angle >= 0)
    return max(angles, key=lambda angle: (angles[angle], -angle), default=0)


def _text(textpage: pypdfium2.PdfTextPage) -> str:
    text: str = textpage.get_text_range()
    if _UNKNOWN in text:
        text = _tell_hyphens(textpage, text)
    if _RIGHT_TO_LEFT.search(text):
        text = _restore_ligatures(textpage, text)
    return text


def _tell_hyphens(textpage: pypdfium2.PdfTextPage, text: str) -> str:
    def meaning(index: int, character: str) -> str:
        if character != _UNKNOWN:
            return character
        char_index = pdfium.FPDFText_GetCharIndexFromTextIndex(textpage, index)
        return _HYPHEN if pdfium.FPDFText_IsHyphen(textpage, char_index) == 1 else "\N{REPLACEMENT CHARACTER}"

    return "".join(meaning(index, character) for index, character in enumerate(text))


def _restore_ligatures(textpage: pypdfium2.PdfTextPage, text: str) -> str:
    """pdfium turns lines that run right to left round, and with them the characters of a single glyph.

    Those of one glyph (lam-alef, or a whole word in some fonts) share one box.
    """

    def box(index: int) -> tuple[float, ...] | int:
        if not _RIGHT_TO_LEFT.match(text[index]):
            return index
        char_index = pdfium.FPDFText_GetCharIndexFromTextIndex(textpage, index)
        return tuple(textpage.get_charbox(char_index))

    glyphs = ([text[index] for index in glyph] for _, glyph in groupby(range(len(text)), key=box))
    return "".join("".join(reversed(glyph)) for glyph in glyphs)


def _has_no_text(page: pypdfium2.PdfPage, text: str) -> bool:
    num_characters = len("".join(text.split()))
    if num_characters >= _STAMP_CHARACTERS:
        return False
    return num_characters == 0 or _largest_image_share(page) >= _SCAN_AREA


def _largest_image_share(page: pypdfium2.PdfPage) -> float:
    area = page.get_width() * page.get_height()
    shares = [0.0]
    for image in page.get_objects(filter=[pdfium.FPDF_PAGEOBJ_IMAGE]):
        left, bottom, right, top = image.get_bounds()
        shares.append((right - left) * (top - bottom) / area)
    return max(shares)
