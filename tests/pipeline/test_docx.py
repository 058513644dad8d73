from pathlib import Path

import docx
import pytest

from pipeline.documents import ReadOptions, Tracked, read_document
from tests.pipeline.made_files import LIMITS, STRICT_WORD, docx_file, numbering_part, p, pages_of, read


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


TRACKED = (
    p("pay ", "<w:del><w:r><w:delText>30</w:delText></w:r></w:del>", "<w:ins><w:r><w:t>60</w:t></w:r></w:ins>", " days")
    + p("<w:ins><w:r><w:t>New clause.</w:t></w:r></w:ins>", more="<w:rPr><w:ins/></w:rPr>")
    + p("<w:moveFrom><w:r><w:t>Here.</w:t></w:r></w:moveFrom>", more="<w:rPr><w:del/></w:rPr>")
    + p("Law", "<w:moveTo><w:r><w:t> and here.</w:t></w:r></w:moveTo>")
    + "<w:tbl><w:tr><w:trPr><w:ins/></w:trPr><w:tc>{0}</w:tc><w:tc>{0}</w:tc></w:tr>"
    "<w:tr><w:trPr><w:del/></w:trPr><w:tc>{1}</w:tc><w:tc>{1}</w:tc></w:tr></w:tbl>".format(p("in"), p("out"))
)


@pytest.mark.parametrize(
    ("tracked", "text"),
    [
        (Tracked.ACCEPT, "pay 60 days\nNew clause.\nLaw and here.\nin | in"),
        (Tracked.REJECT, "pay 30 days\nHere.\nLaw\nout | out"),
        (
            Tracked.MARK,
            "pay [-30-][+60+] days\n[+New clause.+]\n[-Here.-]\nLaw[+ and here.+]\n[+in | in+]\n[-out | out-]",
        ),
    ],
)
def test_tracked_changes_are_accepted_rejected_or_marked(tracked: Tracked, text: str, tmp_path: Path) -> None:
    document = read_document(docx_file(tmp_path, TRACKED), limits=LIMITS, options=ReadOptions(tracked=tracked))

    assert document.text == text


def test_a_clause_put_in_takes_its_number_only_where_it_is_shown(tmp_path: Path) -> None:
    body = (
        p("Term", level=0)
        + p("<w:ins><w:r><w:t>Penalty</w:t></w:r></w:ins>", level=0, more="<w:rPr><w:ins/></w:rPr>")
        + p("Law", level=0)
    )
    path = docx_file(tmp_path, body, numbering=numbering_part(("decimal", "%1.")))

    accepted, rejected = (
        read_document(path, limits=LIMITS, options=ReadOptions(tracked=tracked)).text
        for tracked in (Tracked.ACCEPT, Tracked.REJECT)
    )

    assert accepted == "1. Term\n2. Penalty\n3. Law"
    assert rejected == "1. Term\n2. Law"


def test_comments_follow_their_paragraph_when_asked_for(tmp_path: Path) -> None:
    body = p("pay", '<w:r><w:commentReference w:id="0"/></w:r>', " 60 days")
    comments = f'<w:comments><w:comment w:id="0" w:author="Jane Roe">{p("too")}{p("long!")}</w:comment></w:comments>'

    document = read_document(
        docx_file(tmp_path, body, comments=comments), limits=LIMITS, options=ReadOptions(comments=True)
    )

    assert document.text == "pay 60 days\n[Comment by Jane Roe: too\nlong!]"
