from pathlib import Path

from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas

from tests.pipeline.made_files import lines, pdf_file, raw_pdf_file, read, scan, stamped_scan


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
