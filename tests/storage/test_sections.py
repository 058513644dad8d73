"""Long documents: rows of their sections, from the job to the report and to erasure."""

import pytest

from storage.catalog import document_sections, source_names
from storage.database import Database
from storage.document_progress import document_progress
from storage.documents import put_text
from storage.endings import cancel_job, retry_job
from storage.errors import KeyTaken
from storage.forget import Forgotten, forget_document, forget_tenant
from storage.items import answer_item, fail_item
from storage.job_report import ReportRow, job_report
from storage.jobs import NewSection, NewSource
from storage.objects import FolderStore
from storage.progress import job_progress, job_status
from storage.schema import Base, ItemState, JobRow
from storage.snapshots import claim_writing, find_or_create, note_progress, note_readings
from tests.storage.made_rows import DOC, NOW, OTHER_DOC, answer, claim, fingerprint, later, source, submit

PARTS = [f"{number:x}" * 64 for number in (10, 11, 12)]
SECTIONS = tuple(NewSection(part, 400 * number, 400 * number + 500) for number, part in enumerate(PARTS))


@pytest.fixture
def store(tmp_path: object) -> FolderStore:
    return FolderStore(tmp_path / "objects")  # type: ignore[operator]


def long(name: str = "long.pdf", document_id: str = DOC, sections: tuple[NewSection, ...] = SECTIONS) -> NewSource:
    return NewSource(name, document_id, 1300, (0, 600, 900), sections=sections)


def report(database: Database, job_id: str) -> list[ReportRow]:
    with database.reading() as session:
        return list(job_report(session, "acme", job_id))


def answer_all(database: Database, document_id: str, **changes: object) -> None:
    items = claim(database, document_id=document_id)
    with database.writing() as session:
        for item in items:
            answer_item(session, item.item_id, owner="worker-1", answer=answer(**changes), now=NOW)


def test_each_section_has_the_items_and_the_whole_has_the_rows(database: Database) -> None:
    job_id = submit(database, sources=[long(), source(OTHER_DOC, "short.pdf"), long("copy.pdf")], questions=2)

    with database.reading() as session:
        status, progress = job_status(session, "acme", job_id), job_progress(session, "acme", job_id)
        names = source_names(session, "acme", [PARTS[1]])
        assert document_sections(session, "acme", DOC) == PARTS
        assert document_sections(session, "acme", OTHER_DOC) == []
    assert (status.total, status.rows, status.split, status.sections) == (8, 6, 1, 3)
    assert progress.documents == 4
    assert names == {PARTS[1]: ("copy.pdf (section 2)", "long.pdf (section 2)")}
    rows = report(database, job_id)
    assert [(row.source, row.document_id, len(row.sections)) for row in rows[::2]] == [
        ("long.pdf", DOC, 3),
        ("short.pdf", OTHER_DOC, 0),
        ("copy.pdf", DOC, 3),
    ]
    assert [section.row.page_starts for section in rows[0].sections] == [
        (0, 600, 900),
        (-400, 200, 500),
        (-800, -200, 100),
    ]


def test_a_row_is_open_as_long_as_a_section_is_and_answered_when_one_is(database: Database) -> None:
    job_id = submit(database, sources=[long()], questions=1)

    def state() -> str:
        return report(database, job_id)[0].state

    assert state() == ItemState.QUEUED
    answer_all(database, PARTS[0], first_token_s=0.5)
    assert state() == ItemState.RUNNING
    (item,) = claim(database, document_id=PARTS[1])
    with database.writing() as session:
        fail_item(session, item.item_id, owner="worker-1", code="x", error="It failed.", now=NOW)
    answer_all(database, PARTS[2])

    (row,) = report(database, job_id)
    assert (row.state, row.error, row.answer) == (ItemState.ANSWERED, None, None)
    assert (row.cached_tokens, row.question_tokens, row.output_tokens, row.total_s) == (2000, 24, 8, 2.0)
    assert row.first_token_s == 0.5
    assert [section.row.state for section in row.sections] == ["answered", "failed", "answered"]


def test_a_section_that_failed_is_tried_again_alone(database: Database) -> None:
    job_id = submit(database, sources=[long()], questions=1)
    answer_all(database, PARTS[0])
    (item,) = claim(database, document_id=PARTS[1])
    with database.writing() as session:
        fail_item(session, item.item_id, owner="worker-1", code="x", error="It failed.", now=NOW)
        cancelled = retry_job(session, "acme", job_id, expired=False, answer_by=None, now=NOW)

    assert cancelled == 1
    with database.writing() as session:
        cancel_job(session, "acme", job_id, NOW)
    (row,) = report(database, job_id)
    assert [section.row.state for section in row.sections] == ["answered", "cancelled", "cancelled"]
    assert row.state == ItemState.ANSWERED


def test_one_key_with_another_cut_is_refused(database: Database) -> None:
    job_id = submit(database, sources=[long()], client_key="k")

    assert submit(database, sources=[long()], client_key="k") == job_id
    for other in (long(sections=SECTIONS[:2]), long(sections=())):
        with pytest.raises(KeyTaken):
            submit(database, sources=[other], client_key="k")


def test_pages_and_tokens_of_a_document_are_those_of_its_sections(database: Database) -> None:
    job_id = submit(database, sources=[long(), NewSource("bad.pdf", error_code="x", error="Not read.")], questions=2)
    with database.writing() as session:
        first = find_or_create(session, fingerprint(document_id=PARTS[0]), num_tokens=100, now=NOW)
        note_readings(session, first, model="tiny", computed_tokens=100, prefill_s=1.0, now=NOW)
        second = find_or_create(session, fingerprint(document_id=PARTS[1]), num_tokens=100, now=NOW)
        writing = claim_writing(session, second.snapshot_id, owner="w", now=NOW, lease_s=60)
        assert writing
        note_progress(session, writing, 50)  # characters 400 to 650: page 1 ends at 600
    answer_all(database, PARTS[0])

    with database.reading() as session:
        found, bad = document_progress(session, "acme", job_id)

    assert (found.pages, found.pages_read) == (3, 1)
    assert (found.tokens, found.tokens_read) == (200, 150)
    assert (found.items, found.items_done) == (6, 2)
    assert (bad.pages, bad.items, bad.error) == (0, 0, "Not read.")


def test_forgetting_a_document_forgets_its_sections_but_not_what_another_has_too(
    database: Database, store: FolderStore
) -> None:
    other_sections = (SECTIONS[0], NewSection("f" * 64, 400, 800))
    other = long("other.pdf", OTHER_DOC, other_sections)
    alone, shared = submit(database, sources=[long()], questions=1), submit(database, sources=[other], questions=1)
    both = submit(database, sources=[long(), other], questions=1)
    for key in (DOC, OTHER_DOC, *PARTS, "f" * 64):
        put_text(store, "acme", key, "text")
        answer_all(database, key)

    counts = forget_document(database, store, "acme", DOC, now=later(1))

    assert counts == Forgotten(documents=1, sources=2, items=5, answers=5)
    assert set(store.keys("documents/")) == {f"documents/acme/{key}.txt" for key in (OTHER_DOC, PARTS[0], "f" * 64)}
    assert [row.state for row in report(database, alone)] == ["unreadable"]
    assert [section.row.state for row in report(database, shared) for section in row.sections] == ["answered"] * 2
    gone, kept = report(database, both)
    assert (gone.error_code, gone.sections) == ("forgotten", ())
    assert [section.row.state for section in kept.sections] == ["answered", "answered"]
    with database.reading() as session:
        for job_id, answered in ((alone, 0), (shared, 2), (both, 2)):
            job = session.get(JobRow, job_id)
            assert job is not None and (job.num_answered, job.num_open) == (answered, 0)


def test_a_section_that_was_forgotten_by_itself_is_named_in_its_row(database: Database, store: FolderStore) -> None:
    job_id = submit(database, sources=[long()], questions=1)
    for part in PARTS:
        answer_all(database, part)

    forget_document(database, store, "acme", PARTS[1], now=later(1))

    (row,) = report(database, job_id)
    assert [(section.row.state, section.row.error_code) for section in row.sections] == [
        ("answered", None),
        ("failed", "forgotten"),
        ("answered", None),
    ]


def test_forgetting_a_tenant_leaves_no_section(database: Database, store: FolderStore) -> None:
    submit(database, sources=[long()])

    forget_tenant(database, store, "acme", now=later(1))

    with database.reading() as session:
        for name in ("sections", "documents", "items"):
            assert not session.execute(Base.metadata.tables[name].select()).all()
