"""How far a job is, and what is left of it."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.outlook import outlook
from pipeline.screen import follow
from storage.database import Database
from storage.items import answer_item
from storage.schema import SnapshotState
from storage.settings import StorageSettings
from storage.snapshots import find_or_create, note_readings
from tests.storage.made_rows import DOC, NOW, OTHER_DOC, answer, claim, fingerprint, later, source, submit


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
        database.upgrade()
        yield database


def work_off(database: Database, document_id: str) -> None:
    """Reads 200 tokens in two seconds, and answers every question with four tokens, one a second."""
    with database.writing() as session:
        row = find_or_create(session, fingerprint(document_id=document_id), num_tokens=200, now=NOW)
        row.state = SnapshotState.READY
        note_readings(session, row, model="tiny", computed_tokens=200, prefill_s=2.0, now=NOW)
    for number, item in enumerate(claim(database, document_id=document_id)):
        with database.writing() as session:
            answer_item(session, item.item_id, owner="worker-1", answer=answer(), now=later(number))


def test_what_is_left_is_told_at_the_rates_of_the_work_before(database: Database) -> None:
    job_id = submit(database, sources=[source(), source(OTHER_DOC, "b.pdf")], questions=3)
    unknown = outlook(database, "acme", job_id)
    work_off(database, DOC)

    found = outlook(database, "acme", job_id)

    assert unknown.seconds_left is None and "unknown" in unknown.sentence
    assert (unknown.pages, unknown.tokens, unknown.items) == (4, 500, 6)  # 2,000 characters
    assert (found.pages_read, found.tokens, found.tokens_read, found.items_done) == (2, 400, 200, 3)
    assert found.seconds_left == pytest.approx(200 / 100 + 3 * 4 / 4)
    assert found.sentence == "2 of 4 pages and 200 of 400 tokens read, 3 of 6 questions done; about 5 s left"


def test_two_files_of_one_text_are_one_reading(database: Database) -> None:
    job_id = submit(database, sources=[source(), source(name="copy.pdf")], questions=3)
    work_off(database, DOC)

    found = outlook(database, "acme", job_id)

    assert (found.tokens, found.items, found.items_done, found.seconds_left) == (200, 3, 3, 0.0)
    assert [each.items for each in found.documents] == [3, 3]


def test_programs_get_a_line_of_the_job_and_of_each_document(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submit(database, sources=[source(), source(OTHER_DOC, "b.pdf")], questions=1)
    for document_id in (DOC, OTHER_DOC):
        work_off(database, document_id)

    follow(database, "acme", job_id, console=Console(quiet=True), json_lines=True, by_document=True)

    first, second, job = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["document"] for each in (first, second)] == ["contract.pdf", "b.pdf"]
    assert (first["pages_read"], first["tokens_read"], first["items_done"]) == (2, 200, 1)
    assert (job["items_done"], job["pages"], job["seconds_left"]) == (2, 4, 0.0)
    assert {each["job_id"] for each in (first, second, job)} == {job_id}
