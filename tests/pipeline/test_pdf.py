from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image, ImageDraw
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.utils import ImageReader
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen.canvas import Canvas

from pipeline.documents import ReadOptions, read_document
from pipeline.errors import OcrNotInstalled
from tests.pipeline.made_files import LIMITS, lines, pages_of, pdf_file, raw_pdf_file, read, scan, stamped_scan


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


@pytest.mark.parametrize("page_angle", [0, 90, 180, 270])
def test_lines_are_in_order_however_page_and_text_are_turned(page_angle: int, tmp_path: Path) -> None:
    def turned(text_angle: int) -> Callable[[Canvas], None]:
        def draw(canvas: Canvas) -> None:
            canvas.setPageRotation(page_angle)
            canvas.translate(300, 400)
            canvas.rotate(text_angle)
            for index in range(4):
                canvas.drawString(-150, 100 - 14 * index, f"line {index} of the page")

        return draw

    document = read(pdf_file(tmp_path, *(turned(angle) for angle in (0, 90, 180, 270))))

    assert pages_of(document) == ["\n".join(f"line {index} of the page" for index in range(4))] * 4


def test_a_chinese_pdf_gives_its_characters_and_full_width_marks(tmp_path: Path) -> None:
    written = [
        "采购合同",
        "第十二条 违约责任：任何一方违反约定的，应当赔偿。",
        "金额：人民币￥1,250,000.00元（大写：壹佰贰拾伍万元整）",
    ]
    pdfmetrics.registerFont(UnicodeCIDFont("STSong-Light"))

    def draw(canvas: Canvas) -> None:
        canvas.setFont("STSong-Light", 12)
        for index, line in enumerate(written):
            canvas.drawString(72, 700 - 18 * index, line)

    assert read(pdf_file(tmp_path, draw)).text.split("\n") == written


def test_scans_are_recognised_where_the_extra_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("rapidocr_onnxruntime", reason="needs the extra platemaker[ocr]")

    def picture_of_text(canvas: Canvas) -> None:
        picture = Image.new("L", (1000, 200), 255)
        ImageDraw.Draw(picture).text((20, 60), "PAYMENT TERM 60 DAYS", font_size=60)
        canvas.drawImage(ImageReader(picture), 0, 300, 595, 120)

    document = read_document(pdf_file(tmp_path, picture_of_text, scan), limits=LIMITS, options=ReadOptions(ocr=True))

    assert "60" in document.text
    assert document.pages_without_text == (2,)
    assert "page 1" in document.notes[0]


@pytest.mark.skipif(find_spec("rapidocr_onnxruntime") is not None, reason="the extra platemaker[ocr] is installed")
def test_without_the_extra_recognising_scans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OcrNotInstalled, match=r"platemaker\[ocr\]"):
        read_document(pdf_file(tmp_path, scan), limits=LIMITS, options=ReadOptions(ocr=True))
