from pathlib import Path

import pytest

from tests.pipeline.made_files import pages_of, read, text_file


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One <b>bo</b>ld\n  word</p><p>Two", "One bold word\n\nTwo"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("5 &gt; 4 &amp; &sect;&nbsp;3 &#x7532;", "5 > 4 & § 3 甲"),
        ("<div>x<div>y</div></div>z", "x\ny\nz"),
        ("<head><title>t</title></head><body>x<script>s()</script><style>p{}</style><!-- c -->y", "xy"),
        ("<p>a<span style='display: none'>SECRET</span>b<p hidden>SECRET</p>", "ab"),
        (
            "<ol><li>one<li>two</ol><ol type=a start=3><li>three</li><li value=7>seven</li></ol>",
            "1. one\n2. two\n\nc. three\ng. seven",
        ),
        ("<ul><li>x<ul><li>y</ul><li>z</ul>", "• x\n• y\n\n• z"),
        ("<table><tr><td>Fee<td>5<tr><th>Sum</th><td><p>5</p><p>USD</p></td></table>", "Fee | 5\nSum | 5 USD"),
        ("<table><tr><td>1.</td><td><p>The fee.</p><p>It is due.</p></td></tr></table>", "1. The fee.\n\nIt is due."),
        ("<table><tr><td></td><td>Only text</td></tr></table>", "Only text"),
        ("<pre>a\n  b</pre>", "a\nb"),
        ("<input type=checkbox checked>yes<input type=checkbox>no", "☒ yes☐ no"),
        ("<p>broken </b></div><td>still <i>here", "broken still here"),
    ],
)
def test_html_reads_as_a_browser_shows_it(html: str, text: str, tmp_path: Path) -> None:
    assert read(text_file(tmp_path, f"<html>{html}", "contract.html")).text == text


def test_pages_of_html_are_where_it_breaks_them_for_print(tmp_path: Path) -> None:
    html = "<body>one<hr style='page-break-after: always'><p style='page-break-before:always'>two</p>"
    html += "<div style='break-after:page'>still two</div>three<br style='page-break-before:always'>"

    assert [page.strip() for page in pages_of(read(text_file(tmp_path, html, "contract.htm")))] == [
        "one",
        "",
        "two\n\nstill two",
        "three",
    ]


@pytest.mark.parametrize("encoding", ["gb2312", "big5", "utf-8", "shift_jis", "windows-1251"])
def test_html_is_read_in_the_encoding_it_declares(encoding: str, tmp_path: Path) -> None:
    word = "договор" if encoding == "windows-1251" else "契"
    if encoding == "gb2312":
        word = "合同"
    html = f'<html><meta http-equiv="Content-Type" content="text/html; charset={encoding}"><p>{word}'.encode(encoding)

    assert read(text_file(tmp_path, html, "contract.html")).text == word


def test_a_declared_encoding_that_is_wrong_is_not_believed(tmp_path: Path) -> None:
    html = '<meta charset="utf-8"><p>甲方应当在三十日内付款。'.encode("gb18030")

    assert read(text_file(tmp_path, html, "contract.html")).text == "甲方应当在三十日内付款。"


@pytest.mark.parametrize("name", ["contract.txt", "contract.pdf", "contract", "contract.htm"])
def test_html_is_known_by_its_beginning(name: str, tmp_path: Path) -> None:
    wrapped = "<DOCUMENT>\n<TYPE>EX-10\n<TEXT>\n" if name.endswith(".txt") else ""

    assert read(text_file(tmp_path, f"{wrapped}<!DOCTYPE html><html><p>x", name)).kind == "html"
