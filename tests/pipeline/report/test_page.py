import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.report.files import write_reports
from tests.pipeline.report.nights import ANSWERS, HOSTILE, PAGES, TENANT, Night, split_job

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-quic", "--disable-sync")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *QUIET, "--virtual-time-budget=5000")
ELEMENTS = """
    html meta title style header div h1 p span button b input main table thead tr th tbody td small aside h2 kbd script
"""


@pytest.fixture
def page(night: Night, job_id: str, tmp_path: Path) -> Path:
    path = tmp_path / "a.html"
    write_reports(night.database, night.store, TENANT, job_id, [path])
    return path


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_no_contract_or_answer_becomes_part_of_the_page(page: Path) -> None:
    seen = Seen()
    seen.feed(page.read_text())

    scripts = [attributes for tag, attributes in seen.tags if tag == "script"]
    assert [one for one in scripts if one.get("type") != "application/json"] == [{}]
    assert {tag for tag, _ in seen.tags} <= set(ELEMENTS.split())
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]


def test_the_page_reaches_for_nothing(page: Path) -> None:
    text = page.read_text()

    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].startswith("default-src 'none';")
    assert not re.search(r"""(?:src|href)=["']?(?!x)|url\(|@import|fetch\(|https?://""", text.replace(HOSTILE, ""))


def test_a_document_that_is_there_twice_has_its_pages_once(night: Night, tmp_path: Path) -> None:
    source = night.source("a.pdf")
    job_id = night.job([source, night.source("b.pdf")], {})

    write_reports(night.database, night.store, TENANT, job_id, [tmp_path / "a.html"])

    text = (tmp_path / "a.html").read_text()
    assert text.count(f'id="p{source.document_id}"') == 1
    assert text.count(f'"pages":"p{source.document_id}"') == 2


def looked_at(page: Path, fragment: str, tmp_path: Path) -> str:
    """The page's tree after its script ran, in a real browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here to open the page with")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{page}#{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


def test_an_answer_opens_with_its_quote_marked_in_its_page(page: Path, tmp_path: Path) -> None:
    tree = looked_at(page, "d0-2", tmp_path)

    (mark,) = re.findall(r"<pre>(.*?)<mark[^>]*>(.*?)</mark>(.*?)</pre>", tree, re.DOTALL)
    assert unescape("".join(mark)) == PAGES[1]
    assert unescape(mark[1]) == "limited to EUR 2,500,000 🖋 in each Contract Year"
    assert '<p class="answer">EUR 2,500,000</p>' in tree
    assert "<title>Night</title>" in tree  # what the contract and the answers say was not run


def test_a_quote_over_two_pages_is_marked_in_both(page: Path, tmp_path: Path) -> None:
    tree = looked_at(page, "d0-1", tmp_path)

    marks = re.findall(r"<mark[^>]*>(.*?)</mark>", tree, re.DOTALL)
    assert marks == ["is governed\n", "by the laws of England and Wales"]
    assert re.findall(r"<h3[^>]*>(.*?)</h3>", tree) == ["Page 2", "Page 3"]


def test_a_search_leaves_the_documents_that_hold_it(page: Path, tmp_path: Path) -> None:
    tree = looked_at(page, "q=beta%20french", tmp_path)

    rows = re.findall(r'<tr id="(d\d)"( hidden="")?>', tree)
    assert rows == [("d0", ' hidden=""'), ("d1", ' hidden=""'), ("d2", ""), ("d3", ' hidden=""')]
    assert len(re.findall(r'<td[^>]*class="[^"]*\bhit\b', tree)) == 1


def test_the_words_that_the_model_quoted_are_marked_in_their_page(night: Night, tmp_path: Path) -> None:
    source = night.source("a.pdf")
    job_id = night.job([source], {})
    night.answer(str(source.document_id), ANSWERS, {"assign": "the laws of England"})
    write_reports(night.database, night.store, TENANT, job_id, [tmp_path / "a.html"])

    tree = looked_at(tmp_path / "a.html", "d0-4", tmp_path)

    assert re.findall(r"<mark[^>]*>(.*?)</mark>", tree, re.DOTALL) == ["the laws of England"]
    assert re.findall(r"<h3[^>]*>(.*?)</h3>", tree) == ["Page 3"]


def test_a_merged_answer_opens_with_every_place_that_shows_it(night: Night, tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    write_reports(night.database, night.store, TENANT, split_job(night), [path])

    tree = looked_at(path, "d0-4", tmp_path)

    assert re.findall(r"<mark[^>]*>(.*?)</mark>", tree, re.DOTALL) == ["SUPPLY AGREEMENT of 30 November", "十日内付款"]
    assert re.findall(r"<h3[^>]*>(.*?)</h3>", tree) == ["Page 1", "Page 3"]
    assert "merged: 2 sections, 2 answered" in tree
    assert re.findall(r'<button class="jump">(.*?)</button>', tree) == ["page 1", "page 3"]
