"""From submission under a key to expiry and retry: a job, its items, and its counts of them."""

import random
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import func, select

from storage.carrying import carry_answers
from storage.database import Database
from storage.endings import cancel_job, end_overdue, release_held, retry_job
from storage.errors import KeyTaken, RetryRefused
from storage.items import (
    answer_item,
    cancel_item,
    cancelled_items,
    end_readings,
    fail_item,
    is_wanted,
    queued_items,
    recover_items,
    release_items,
)
from storage.jobs import JobTimes
from storage.kicks import take_unkicked
from storage.progress import JobStatus, job_status
from storage.schema import AnswerRow, ItemRow, ItemState, JobRow, LineageRow, SnapshotState
from storage.snapshots import find_or_create, note_readings
from storage.tiers import Tier
from storage.units import asked_tier
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

OF_DOC: dict[str, Any] = {"tenant": "acme", "document_id": DOC, "model": "tiny"}


def status(database: Database, job_id: str) -> JobStatus:
    with database.reading() as session:
        return job_status(session, "acme", job_id)


def counted(database: Database, job_id: str) -> dict[ItemState, int]:
    with database.reading() as session:
        rows = session.execute(
            select(ItemRow.state, func.count()).where(ItemRow.job_id == job_id).group_by(ItemRow.state)
        )
        return {ItemState(state): count for state, count in rows}


def test_a_key_stands_for_one_job(database: Database) -> None:
    first = submit(database, client_key="night-7")

    assert submit(database, client_key="night-7", title="again", now=later(9)) == first
    assert submit(database, client_key="night-8") != first
    assert submit(database, client_key="night-7", tenant="other") != first
    with pytest.raises(KeyTaken, match=first):
        submit(database, client_key="night-7", questions=2)
    with database.reading() as session:
        assert session.scalar(select(func.count()).select_from(JobRow)) == 3
        assert session.scalar(select(func.count()).select_from(ItemRow)) == 9


def test_one_job_however_many_submit_under_one_key(database: Database) -> None:
    made = race(lambda _: submit(database, client_key="night-7"), 6)

    assert len(set(made)) == 1
    assert counted(database, made[0]) == {ItemState.QUEUED: 3}


def test_a_job_before_its_time_is_neither_sent_nor_claimed(database: Database) -> None:
    job_id = submit(database, times=JobTimes(not_before=later(60)))

    def look(now: datetime) -> tuple[int, int, bool]:
        with database.writing() as session:
            recover_items(session, now=now, max_attempts=3)
            kicked = len(take_unkicked(session, now=now, kicked_before=now, limit=10))
            waiting = len(queued_items(session, **OF_DOC))
            return kicked, waiting, is_wanted(session, **OF_DOC, now=now)

    assert look(later(59)) == (0, 0, False)
    assert status(database, job_id).items == {ItemState.HELD: 3}
    assert claim(database, now=later(59)) == []
    assert look(later(60)) == (1, 3, True)
    assert status(database, job_id).items == {ItemState.QUEUED: 3}


def test_what_is_not_answered_in_time_expires(database: Database) -> None:
    job_id = submit(database, questions=4, times=JobTimes(answer_by=later(60)))
    endless = submit(database, questions=1)
    done, running = claim(database, limit=2)
    with database.writing() as session:
        answer_item(session, done.item_id, owner="worker-1", answer=answer(), now=later(1))

    assert [item.job_id for item in claim(database, "worker-2", now=later(60))] == [endless]
    with database.writing() as session:
        assert cancelled_items(session, "worker-1", later(59)) == set()
        assert cancelled_items(session, "worker-1", later(60)) == {running.item_id}
        assert end_overdue(session, later(60)) == 2
        cancel_item(session, running.item_id, owner="worker-1", now=later(61))

    assert status(database, job_id).items == {ItemState.ANSWERED: 1, ItemState.EXPIRED: 3}
    assert status(database, job_id).finished_at == later(61)
    assert status(database, endless).items == {ItemState.RUNNING: 1}


def test_a_held_job_can_expire_and_be_cancelled(database: Database) -> None:
    late = submit(database, times=JobTimes(not_before=later(60), answer_by=later(90)))
    ended = submit(database, times=JobTimes(not_before=later(60)))

    with database.writing() as session:
        cancel_job(session, "acme", ended, later(1))
        end_overdue(session, later(90))
        release_held(session, later(90))

    assert status(database, late).items == {ItemState.EXPIRED: 3}
    assert status(database, ended).items == {ItemState.CANCELLED: 3}


def test_a_retry_queues_what_failed_as_if_never_tried(database: Database) -> None:
    asked = [question(0), question(1), question(2, error_code="empty_question", error="Empty.")]
    job_id = submit(database, questions=asked)
    done, failed = claim(database)
    with database.writing() as session:
        answer_item(session, done.item_id, owner="worker-1", answer=answer(), now=later(1))
        fail_item(session, failed.item_id, owner="worker-1", code="decode_failed", error="Odd.", now=later(2))

    with database.writing() as session:
        assert retry_job(session, "acme", job_id, expired=False, answer_by=None, now=later(3)) == 1

    assert status(database, job_id).items == {ItemState.ANSWERED: 1, ItemState.QUEUED: 1, ItemState.FAILED: 1}
    assert status(database, job_id).finished_at is None
    with database.reading() as session:
        again = session.get_one(ItemRow, failed.item_id)
        assert (again.attempts, again.error, again.error_code, again.finished_at) == (0, None, None, None)
        assert len(session.scalars(select(AnswerRow)).all()) == 1
        history = session.scalars(select(LineageRow)).one()
    assert history.document_id == DOC and "decode_failed, tried 1 times" in history.detail


def test_a_retry_of_what_expired_lifts_the_time_that_has_passed(database: Database) -> None:
    job_id = submit(database, times=JobTimes(answer_by=later(60)))
    with database.writing() as session:
        end_overdue(session, later(60))

    def retry(seconds: float, *, expired: bool, answer_by: datetime | None) -> int:
        with database.writing() as session:
            return retry_job(session, "acme", job_id, expired=expired, answer_by=answer_by, now=later(seconds))

    def overdue(seconds: float) -> int:
        with database.writing() as session:
            return end_overdue(session, later(seconds))

    assert retry(61, expired=False, answer_by=None) == 0
    assert retry(61, expired=True, answer_by=later(99)) == 3
    assert overdue(98) == 0
    assert overdue(99) == 3
    assert retry(100, expired=True, answer_by=None) == 3
    assert overdue(1000) == 0


def test_a_cancelled_job_is_not_tried_again(database: Database) -> None:
    job_id = submit(database)
    with database.writing() as session:
        cancel_job(session, "acme", job_id, NOW)

    with pytest.raises(RetryRefused), database.writing() as session:
        retry_job(session, "acme", job_id, expired=True, answer_by=None, now=later(1))


def test_a_job_that_only_reads_waits_for_snapshots_and_no_answers(database: Database) -> None:
    job_id = submit(database, sources=[source(), source(OTHER_DOC), unreadable()], questions=0, only_prefill=True)

    with database.writing() as session:
        assert is_wanted(session, **OF_DOC, now=NOW)
        assert queued_items(session, **OF_DOC) == []
        assert len(take_unkicked(session, now=NOW, kicked_before=NOW, limit=10)) == 2
        end_readings(session, **OF_DOC, now=later(1))

    assert status(database, job_id).items == {ItemState.ANSWERED: 1, ItemState.QUEUED: 1}
    with database.writing() as session:
        end_readings(session, **{**OF_DOC, "document_id": OTHER_DOC}, now=later(2))
    assert status(database, job_id).finished_at == later(2)


def answered(database: Database, print_of: str, *texts: str) -> list[int]:
    """A finished job with these questions, answered from a snapshot of that fingerprint; the ids of its items."""
    submit(database, questions=[question(at, text=text) for at, text in enumerate(texts)])
    made = fingerprint(weights=print_of)
    taken = claim(database)
    with database.writing() as session:
        row = find_or_create(session, made, num_tokens=8, now=NOW)
        for item in taken:
            given = answer(f"To {item.question}", snapshot_id=row.snapshot_id)
            answer_item(session, item.item_id, owner="worker-1", answer=given, now=later(1))
    return [item.item_id for item in taken]


def carry(database: Database, print_of: str) -> int:
    with database.writing() as session:
        digest = fingerprint(weights=print_of).digest()
        return carry_answers(session, **OF_DOC, fingerprint=digest, now=later(9))


def test_answers_are_carried_over_to_equal_questions_of_an_equal_snapshot_only(database: Database) -> None:
    first, _ = answered(database, "w1", "When?", "Who?")
    reported_anew = question(0, text="When?", spec={"quote": True})
    asked = [reported_anew, question(1, text="Where?"), question(2, text="Who?", params={"seed": 3})]
    plain = submit(database, questions=asked)
    job_id = submit(database, questions=asked, reuse_answers=True)

    assert carry(database, "w2") == 0
    assert carry(database, "w1") == 1
    assert carry(database, "w1") == 0
    assert status(database, job_id).items == {ItemState.ANSWERED: 1, ItemState.QUEUED: 2}
    assert status(database, plain).items == {ItemState.QUEUED: 3}
    with database.reading() as session:
        copy = session.scalars(select(AnswerRow).where(AnswerRow.carried_from.is_not(None))).one()
        original = session.get_one(AnswerRow, first)
    assert (copy.carried_from, copy.text, copy.snapshot_id) == (first, "To When?", original.snapshot_id)


def test_what_may_have_been_answered_before_is_not_asked_until_prefill_has_looked(database: Database) -> None:
    answered(database, "w1", "When?", "Who?")
    submit(database, questions=[question(0, text="When?"), question(1, text="Where?")], reuse_answers=True)
    submit(database, questions=0, only_prefill=True)
    with database.writing() as session:
        row = find_or_create(session, fingerprint(weights="w1"), num_tokens=8, now=NOW)
        row.state = SnapshotState.READY

    def look() -> Tier | None:
        with database.reading() as session:
            return asked_tier(session, **OF_DOC, now=later(9))

    assert claim(database) == [] and look() is None
    carry(database, "w1")
    with database.writing() as session:
        note_readings(session, row, model="tiny", computed_tokens=0, prefill_s=0.0, now=later(9))
    assert look() is not None
    assert [item.question for item in claim(database)] == ["Where?"]
    assert look() is None


def test_a_carried_answer_says_where_it_was_given_however_often_it_is_carried(database: Database) -> None:
    first = answered(database, "w1", "When?")
    for _ in range(3):
        job_id = submit(database, questions=[question(0, text="When?")], reuse_answers=True)
        assert carry(database, "w1") == 1

    assert status(database, job_id).finished_at == later(9)
    with database.reading() as session:
        copies = session.scalars(select(AnswerRow.carried_from).where(AnswerRow.carried_from.is_not(None))).all()
    assert copies == first * 3


def test_the_counts_of_a_job_are_those_of_its_items_whatever_happens(database: Database) -> None:
    chance = random.Random()
    jobs = [submit(database, questions=6, times=JobTimes(answer_by=later(40 if at else 1000))) for at in range(3)]
    for second in range(60):
        held = claim(database, limit=chance.randint(0, 4), now=later(second), lease_s=chance.choice([1, 50]))
        with database.writing() as session:
            for item in held:
                how = chance.randrange(4)
                if how == 0:
                    answer_item(session, item.item_id, owner="worker-1", answer=answer(), now=later(second))
                elif how == 1:
                    fail_item(session, item.item_id, owner="worker-1", code="x", error="X.", now=later(second))
                elif how == 2:
                    release_items(session, "worker-1")
            recover_items(session, now=later(second), max_attempts=2)
            if chance.random() < 0.2:
                retry_job(session, "acme", jobs[0], expired=True, answer_by=None, now=later(second))
            if second == 30:
                cancel_job(session, "acme", jobs[2], later(second))
    for job_id in jobs:
        found = status(database, job_id)
        assert found.items == counted(database, job_id)
        assert found.total == 6
        assert (found.finished_at is not None) == (found.open == 0)
