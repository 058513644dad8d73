"""Jobs on both databases: written whole, read by their tenant only, finished exactly when nothing is open."""

import secrets
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from storage.database import Database
from storage.documents import add_documents, get_text, put_text, require_document
from storage.endings import cancel_job
from storage.errors import DocumentUnknown, JobMissing
from storage.items import answer_item, cancel_item, fail_item, recover_items
from storage.job_report import ReportRow, job_report
from storage.jobs import NewQuestion, NewSource, create_job
from storage.objects import FolderStore
from storage.progress import Timing, job_progress, job_readings, job_status, job_timing, list_jobs
from storage.schema import AnswerRow, Base, DocumentRow, ItemRow, ItemState, JobRow, SourceRow
from storage.snapshots import claim_writing, find_or_create, note_progress, note_readings
from tests.storage.made_rows import (
    DOC,
    NOW,
    OTHER_DOC,
    answer,
    claim,
    fingerprint,
    later,
    question,
    race,
    source,
    submit,
    unreadable,
)

AWKWARD = [
    "He said \"no\"; O'Neil's 100 % \\ `x`; DROP TABLE jobs;--",
    "line one\nline two\r\n\ttabbed",
    "《供应合同》第九十条：买方不得转让。",
    "مادة ١ 🧾 a\u0301 \u2028 \u00a0 %s :name {x}",
    "",
]


def report(database: Database, job_id: str, tenant: str = "acme") -> list[ReportRow]:
    with database.reading() as session:
        return list(job_report(session, tenant, job_id))


def count(database: Database, table: type[Base]) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def finished_at(database: Database, job_id: str) -> datetime | None:
    with database.reading() as session:
        return job_status(session, "acme", job_id).finished_at


def answer_first(database: Database, owner: str = "worker-1", *, now: datetime = NOW, **changes: Any) -> int:
    (item,) = claim(database, owner, limit=1, now=now)
    with database.writing() as session:
        assert answer_item(session, item.item_id, owner=owner, answer=answer(**changes), now=now)
    return item.item_id


def test_a_job_has_an_item_for_each_document_and_question(database: Database) -> None:
    job_id = submit(database, sources=[source(), source(OTHER_DOC, "b.pdf")], questions=3)

    with database.reading() as session:
        status = job_status(session, "acme", job_id)
    assert status.items == {ItemState.QUEUED: 6}
    assert (status.sources, status.questions, status.rows) == (2, 3, 6)
    assert (status.total, status.open, status.done) == (6, 6, 0)
    assert (status.title, status.model, status.sources_failed) == ("Night", "tiny", 0)
    assert (status.created_at, status.cancelled_at, status.finished_at) == (NOW, None, None)


def test_two_sources_of_one_text_share_its_items_and_both_have_their_rows(database: Database) -> None:
    job_id = submit(database, sources=[source(name="a.pdf"), source(OTHER_DOC, "b.pdf"), source(name="copy of a.pdf")])
    answer_first(database, text="Shared.")

    rows = report(database, job_id)

    assert count(database, ItemRow) == 6
    assert len(rows) == 9
    assert [row.source for row in rows if row.answer == "Shared."] == ["a.pdf", "copy of a.pdf"]


def test_a_document_of_two_jobs_has_one_row(database: Database) -> None:
    submit(database, now=NOW)
    submit(database, sources=[NewSource(name="b", document_id=DOC, num_chars=7)], now=later(10))

    with database.reading() as session:
        row = require_document(session, "acme", DOC)
    assert count(database, DocumentRow) == 1
    assert (row.num_chars, row.created_at) == (1000, NOW)


def test_a_question_that_cannot_be_asked_ends_failed_at_once(database: Database) -> None:
    bad = question(1, error_code="too_long", error="The question has 9000 tokens.")
    job_id = submit(database, sources=[source(), source(OTHER_DOC, "b.pdf")], questions=[question(0), bad])

    rows = report(database, job_id)

    assert [row.state for row in rows] == ["queued", "failed"] * 2
    assert (rows[1].error_code, rows[1].error) == ("too_long", "The question has 9000 tokens.")
    with database.reading() as session:
        items = session.scalars(select(ItemRow).where(ItemRow.state == ItemState.FAILED)).all()
    assert [(item.finished_at, item.attempts) for item in items] == [(NOW, 0)] * 2
    assert len(claim(database)) == 1


@pytest.mark.parametrize(
    ("sources", "questions"),
    [
        ([unreadable("a.pdf"), unreadable("b.pdf")], [question(0), question(1)]),
        ([source()], [question(0, error_code="empty", error="No text.")]),
        ([source()], []),
        ([], [question()]),
    ],
    ids=["nothing readable", "nothing askable", "no question", "no source"],
)
def test_a_job_with_nothing_to_do_is_finished_at_once(
    database: Database, sources: list[NewSource], questions: list[NewQuestion]
) -> None:
    job_id = submit(database, sources=sources, questions=questions)

    assert finished_at(database, job_id) == NOW
    assert len(report(database, job_id)) == len(sources) * len(questions)


def test_an_unreadable_file_has_its_rows_with_its_error(database: Database) -> None:
    job_id = submit(database, sources=[unreadable(), source()], questions=2)

    rows = report(database, job_id)

    assert [row.state for row in rows] == ["unreadable", "unreadable", "queued", "queued"]
    assert {(row.error_code, row.document_id, row.answer) for row in rows[:2]} == {("no_text", None, None)}
    with database.reading() as session:
        assert job_status(session, "acme", job_id).sources_failed == 1


def test_the_report_keeps_the_order_given_however_far_the_job_is(database: Database) -> None:
    # Neither the names nor the ids are in order, and the answers come from the end.
    documents = [f"{n * 7 % 10}{'e' * 63}" for n in range(5)]
    sources = [source(document_id, f"{9 - n}.pdf") for n, document_id in enumerate(documents)]
    sources.insert(2, unreadable("scan.pdf"))
    job_id = submit(database, sources=sources, questions=[question(n) for n in (2, 0, 1)])
    expected = [(made.name, f"q{n}") for made in sources for n in (2, 0, 1)]

    for document_id in [None, *reversed(documents)]:
        for item in reversed(claim(database, document_id=document_id)) if document_id else ():
            with database.writing() as session:
                answer_item(session, item.item_id, owner="worker-1", answer=answer(str(item.item_id)), now=NOW)
            rows = report(database, job_id)
            assert [(row.source, row.question_id) for row in rows] == expected
    assert [row.state for row in rows] == ["answered"] * 6 + ["unreadable"] * 3 + ["answered"] * 9
    assert finished_at(database, job_id) == NOW


def test_the_report_holds_what_was_given_and_what_was_answered(database: Database) -> None:
    job_id = submit(database, questions=1)
    answer_first(database, text="Ninety days.", output_tokens=5, first_token_s=0.125, total_s=2.5, finish="length")

    (row,) = report(database, job_id)

    assert row == ReportRow(
        source_position=0,
        source="contract.pdf",
        document_id=DOC,
        page_starts=(0, 500),
        question_position=0,
        question_id="q0",
        title="Title 0",
        question="Question 0?",
        state="answered",
        answer="Ninety days.",
        finish="length",
        error_code=None,
        error=None,
        cached_tokens=1000,
        question_tokens=12,
        output_tokens=5,
        first_token_s=0.125,
        total_s=2.5,
        way="split",
        why="mode",
    )


def test_every_text_survives(database: Database) -> None:
    for awkward in AWKWARD:
        asked = question(text=awkward, title=awkward, question_id=awkward, params={"stop": [awkward], awkward: 1})
        failed = question(1, error_code="x", error=awkward or "-")
        unread = NewSource(name="b", error_code="x", error=awkward)
        job_id = submit(
            database,
            sources=[source(name=awkward), unread],
            questions=[asked, failed],
            title=awkward,
            model=awkward,
        )
        (item,) = claim(database, model=awkward)
        with database.writing() as session:
            answer_item(session, item.item_id, owner="worker-1", answer=answer(awkward), now=NOW)

        first, second, third, _ = report(database, job_id)

        assert (item.question, item.params) == (awkward, {"stop": [awkward], awkward: 1})
        assert (first.source, first.question_id, first.title, first.question, first.answer) == (awkward,) * 5
        assert (second.error, third.error) == (awkward or "-", awkward)
        with database.reading() as session:
            status = job_status(session, "acme", job_id)
        assert (status.title, status.model) == (awkward, awkward)


def test_text_that_no_database_takes_stops_nothing(database: Database) -> None:
    """A NUL that the model wrote; a name from an old zip archive, which is no UTF-8."""
    job_id = submit(database, sources=[source(name="\udcba\udccf同.pdf")], questions=[question(text="a\0b")])
    answer_first(database, text="Ninety\0 days.")

    (row,) = report(database, job_id)

    assert (row.source, row.question, row.answer) == ("??同.pdf", "ab", "Ninety days.")


def test_times_come_back_in_utc_whatever_zone_they_were_given_in(database: Database) -> None:
    for zone in (UTC, timezone(timedelta(hours=8)), timezone(timedelta(hours=-3, minutes=-30))):
        job_id = submit(database, questions=1, now=NOW.astimezone(zone))
        item_id = answer_first(database, now=later(0.000001).astimezone(zone))

        with database.reading() as session:
            status = job_status(session, "acme", job_id)
            item = session.get_one(ItemRow, item_id)
            answered = session.get_one(AnswerRow, item_id)
        found = [status.created_at, status.finished_at, item.finished_at, answered.created_at]
        assert found == [NOW, later(0.000001), later(0.000001), later(0.000001)]
        assert {value.tzinfo for value in found if value} == {UTC}


def test_times_compare_as_moments_not_as_texts(database: Database) -> None:
    """What PostgreSQL does by itself and SQLite, which keeps text, only if every time is written in one zone."""
    submit(database, questions=1)
    claim(database, lease_s=60)
    away = timezone(timedelta(hours=-11))
    with database.writing() as session:
        assert recover_items(session, now=later(59).astimezone(away), max_attempts=3) == 0
        assert recover_items(session, now=later(61).astimezone(away), max_attempts=3) == 1


def other_tenant_calls(job_id: str) -> list[Callable[[Session], object]]:
    return [
        lambda session: job_status(session, "other", job_id),
        lambda session: job_progress(session, "other", job_id),
        lambda session: list(job_report(session, "other", job_id)),
        lambda session: cancel_job(session, "other", job_id, NOW),
    ]


def test_another_tenant_finds_nothing(database: Database) -> None:
    job_id = submit(database)
    with database.writing() as session:
        row = find_or_create(session, fingerprint(), num_tokens=100, now=NOW)
        note_readings(session, row, model="tiny", computed_tokens=100, prefill_s=1.0, now=NOW)

    with database.writing() as session:
        for call in other_tenant_calls(job_id):
            with pytest.raises(JobMissing) as caught:
                call(session)
            assert caught.value.job_id == job_id
        assert job_readings(session, "other", job_id) == []
        assert list_jobs(session, "other", 10) == []
        with pytest.raises(DocumentUnknown) as unknown:
            require_document(session, "other", DOC)
        assert unknown.value.document_id == DOC
    assert claim(database, tenant="other") == []
    with database.reading() as session:
        assert len(job_readings(session, "acme", job_id)) == 1
        assert job_status(session, "acme", job_id).items == {ItemState.QUEUED: 3}
        assert job_status(session, "acme", job_id).cancelled_at is None


def test_two_tenants_with_one_document_share_no_row_and_no_item(database: Database) -> None:
    ours, theirs = submit(database), submit(database, tenant="other")

    claimed = claim(database)

    assert {item.job_id for item in claimed} == {ours}
    with database.reading() as session:
        assert job_status(session, "other", theirs).items == {ItemState.QUEUED: 3}
    assert count(database, DocumentRow) == 2


def test_a_job_that_never_was_is_missing(database: Database) -> None:
    with database.reading() as session, pytest.raises(JobMissing, match="platemaker jobs"):
        job_status(session, "acme", "0123456789ab")


def test_cancelling_keeps_answers_ends_what_waits_and_flags_what_runs(database: Database) -> None:
    job_id = submit(database, questions=5)
    answer_first(database, text="Kept.")
    running = claim(database, limit=2)

    with database.writing() as session:
        ended = cancel_job(session, "acme", job_id, later(1))

    assert ended == 2
    with database.reading() as session:
        status = job_status(session, "acme", job_id)
    assert status.items == {ItemState.ANSWERED: 1, ItemState.RUNNING: 2, ItemState.CANCELLED: 2}
    assert (status.cancelled_at, status.finished_at) == (later(1), None)

    with database.writing() as session:
        assert cancel_item(session, running[0].item_id, owner="worker-1", now=later(2))
    assert finished_at(database, job_id) is None

    with database.writing() as session:
        assert recover_items(session, now=later(100), max_attempts=3) == 1
    assert finished_at(database, job_id) == later(100)
    rows = report(database, job_id)
    assert [row.state for row in rows] == ["answered"] + ["cancelled"] * 4
    assert rows[0].answer == "Kept."


def test_an_answer_that_comes_just_after_the_cancel_is_kept(database: Database) -> None:
    job_id = submit(database, questions=1)
    (item,) = claim(database)
    with database.writing() as session:
        cancel_job(session, "acme", job_id, later(1))

    with database.writing() as session:
        assert answer_item(session, item.item_id, owner="worker-1", answer=answer("Late."), now=later(2))

    assert [row.answer for row in report(database, job_id)] == ["Late."]
    assert finished_at(database, job_id) == later(2)


def test_cancelling_twice_is_cancelling_once(database: Database) -> None:
    job_id = submit(database)
    with database.writing() as session:
        assert cancel_job(session, "acme", job_id, later(1)) == 3

    with database.writing() as session:
        assert cancel_job(session, "acme", job_id, later(2)) == 0

    with database.reading() as session:
        status = job_status(session, "acme", job_id)
    assert (status.cancelled_at, status.finished_at) == (later(1), later(1))


def test_a_finished_job_is_not_cancelled_any_more(database: Database) -> None:
    job_id = submit(database, questions=1)
    answer_first(database, now=later(1))

    with database.writing() as session:
        assert cancel_job(session, "acme", job_id, later(2)) == 0

    with database.reading() as session:
        status = job_status(session, "acme", job_id)
    assert (status.cancelled_at, status.finished_at) == (None, later(1))


def test_cancelling_leaves_other_jobs_of_the_document_alone(database: Database) -> None:
    job_id, other = submit(database), submit(database)

    with database.writing() as session:
        cancel_job(session, "acme", job_id, NOW)

    assert {item.job_id for item in claim(database)} == {other}


def test_a_job_is_finished_exactly_when_nothing_is_open(database: Database) -> None:
    job_id = submit(database, sources=[source(), unreadable()], questions=3)
    answered, failed, cancelled = claim(database)
    endings: list[Callable[[Session], bool]] = [
        lambda session: answer_item(session, answered.item_id, owner="worker-1", answer=answer(), now=later(1)),
        lambda session: fail_item(session, failed.item_id, owner="worker-1", code="x", error="X", now=later(2)),
        lambda session: cancel_item(session, cancelled.item_id, owner="worker-1", now=later(3)),
    ]
    for ending in endings:
        assert finished_at(database, job_id) is None
        with database.writing() as session:
            assert ending(session)

    assert finished_at(database, job_id) == later(3)


def test_a_job_is_finished_although_its_last_items_end_at_the_same_moment(database: Database) -> None:
    """Each of two transactions sees the other's item still open; one of them has to look again."""
    for _ in range(10):
        job_id = submit(database, questions=4)
        items = [claim(database, f"worker-{n}", limit=1)[0].item_id for n in range(4)]

        def end(number: int, items: list[int] = items) -> None:
            with database.writing() as session:
                answer_item(session, items[number], owner=f"worker-{number}", answer=answer(), now=NOW)
                if database.engine.dialect.name == "postgresql":
                    time.sleep(0.02)  # before the commit

        race(end, 4)

        assert finished_at(database, job_id) == NOW


def test_ten_thousand_items_are_created_at_once(database: Database) -> None:
    sources = [source(f"{n:064x}", f"{n}.pdf") for n in range(200)]
    start = time.perf_counter()

    job_id = submit(database, sources=sources, questions=50)

    seconds = time.perf_counter() - start
    sys.stdout.write(f"{database.engine.dialect.name}: 10,000 items in {seconds:.2f} s\n")  # seen with pytest -rP
    with database.reading() as session:
        assert job_status(session, "acme", job_id).items == {ItemState.QUEUED: 10_000}


def test_a_failure_inside_the_transaction_leaves_nothing(database: Database) -> None:
    with pytest.raises(RuntimeError), database.writing() as session:
        create_job(session, tenant="acme", model="m", title="t", sources=[source()], questions=[question()], now=NOW)
        raise RuntimeError

    assert [count(database, table) for table in (JobRow, DocumentRow, SourceRow, ItemRow)] == [0, 0, 0, 0]


def test_submissions_of_the_same_documents_do_not_block_each_other(database: Database) -> None:
    sources = [source(f"{n:064x}", f"{n}.pdf") for n in range(40)]

    race(lambda number: submit(database, sources=sources[:: 1 if number % 2 else -1], questions=1), 8)

    assert (count(database, DocumentRow), count(database, ItemRow)) == (40, 320)


def test_timing_counts_time_in_which_at_least_one_answer_was_decoded(database: Database) -> None:
    job_id = submit(database, sources=[source(), source(name="copy")], questions=4)
    for at, total_s in ((10, 4), (12, 4), (11, 1), (30, 2)):  # 6–10, 8–12, 10–11, 28–30
        answer_first(database, now=later(at), total_s=float(total_s), output_tokens=3)

    with database.reading() as session:
        timing = job_timing(session, job_id)

    assert timing == Timing(cached_tokens=4000, output_tokens=12, decode_s=pytest.approx(8.0))


def test_timing_of_a_job_without_answers_is_zero(database: Database) -> None:
    job_id = submit(database)

    with database.reading() as session:
        assert job_timing(session, job_id) == Timing(0, 0, 0.0)


def test_progress_follows_a_job_from_submission_to_the_last_answer(database: Database) -> None:
    job_id = submit(database, sources=[source(), source(OTHER_DOC, "b.pdf"), unreadable()], questions=2)

    def progress() -> dict[str, int]:
        with database.reading() as session:
            return vars(job_progress(session, "acme", job_id))

    nothing = {"items": 4, "items_done": 0, "documents": 2, "documents_read": 0}
    assert progress() == {**nothing, "reading_tokens": 0, "reading_done": 0, "found": 0}

    with database.writing() as session:
        row = find_or_create(session, fingerprint(), num_tokens=1000, now=NOW)
        writing = claim_writing(session, row.snapshot_id, owner="w", now=NOW, lease_s=60)
        assert writing
        note_progress(session, writing, 256)
    assert progress() == {**nothing, "reading_tokens": 1000, "reading_done": 256, "found": 0}

    with database.writing() as session:
        note_readings(session, row, model="tiny", computed_tokens=1000, prefill_s=1.0, now=NOW)
    with database.writing() as session:
        other = find_or_create(session, fingerprint(document_id=OTHER_DOC), num_tokens=500, now=NOW)
        note_readings(session, other, model="tiny", computed_tokens=0, prefill_s=0.0, now=NOW)
    answer_first(database)
    assert {**progress(), "reading_tokens": 0, "reading_done": 0} == {
        "items": 4, "items_done": 1, "documents": 2, "documents_read": 2, "reading_tokens": 0, "reading_done": 0,
        "found": 1,
    }  # fmt: skip


def test_progress_does_not_count_what_is_read_for_others(database: Database) -> None:
    job_id = submit(database)
    with database.writing() as session:
        for changes in ({"tenant": "other"}, {"document_id": OTHER_DOC}):
            row = find_or_create(session, fingerprint(**changes), num_tokens=1000, now=NOW)
            claim_writing(session, row.snapshot_id, owner="w", now=NOW, lease_s=60)

    with database.reading() as session:
        assert job_progress(session, "acme", job_id).reading_tokens == 0


def test_jobs_are_listed_newest_first(database: Database) -> None:
    ids = [submit(database, title=f"night {n}", now=later(n * 5 % 7)) for n in range(7)]
    submit(database, tenant="other", now=later(100))

    with database.reading() as session:
        found = list_jobs(session, "acme", 5)

    by_time = sorted(ids, key=lambda job_id: ids.index(job_id) * 5 % 7, reverse=True)
    assert [status.job_id for status in found] == by_time[:5]
    assert found[0].items == {ItemState.QUEUED: 3}


def test_a_document_comes_back_as_it_was_put(database: Database, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "objects")
    for awkward in AWKWARD:
        put_text(store, "acme", DOC, awkward)
        assert get_text(store, "acme", DOC) == awkward

    with database.writing() as session:
        add_documents(session, "acme", {DOC: 5}, NOW)
        add_documents(session, "acme", {DOC: 9}, later(1))
    with database.reading() as session:
        row = require_document(session, "acme", DOC)
    assert (row.num_chars, row.text_key) == (5, f"documents/acme/{DOC}.txt")


def test_an_error_of_the_database_does_not_show_what_was_to_be_written(database: Database) -> None:
    """Errors are logged, and neither documents, questions nor answers may be."""
    secret = secrets.token_hex(8)
    submit(database, title=secret)

    with pytest.raises(IntegrityError) as caught, database.writing() as session:
        job_id = session.scalars(select(JobRow.job_id)).one()
        session.execute(insert(JobRow).values(job_id=job_id, tenant="acme", model="m", title=secret, created_at=NOW))

    assert secret not in "".join(traceback.format_exception(caught.value))


def test_a_reader_does_not_wait_for_a_writer(database: Database) -> None:
    job_id = submit(database)

    with database.writing() as writer:
        cancel_job(writer, "acme", job_id, NOW)
        with database.reading() as reader:
            assert job_status(reader, "acme", job_id).items == {ItemState.QUEUED: 3}


def test_transactions_that_read_before_they_write_follow_each_other(database: Database) -> None:
    job_id = submit(database, questions=1)

    def count_up(_: int) -> None:
        for _ in range(10):
            with database.writing() as session:
                row = session.scalars(select(ItemRow).where(ItemRow.job_id == job_id).with_for_update()).one()
                row.attempts += 1

    race(count_up, 4)

    with database.reading() as session:
        assert session.scalars(select(ItemRow.attempts)).one() == 40
