"""Schedules: one run of an occurrence, whoever tries."""

from typing import Any

import pytest

from storage.database import Database
from storage.errors import ScheduleMissing, ScheduleTaken
from storage.items import answer_item
from storage.schedules import (
    add_schedule,
    claim_run,
    finish_run,
    give_back_run,
    list_schedules,
    new_work,
    pause_schedule,
    remove_schedule,
    require_schedule,
    resume_schedule,
    schedule_runs,
)
from tests.storage.made_rows import DOC, NOW, OTHER_DOC, answer, claim, later, question, race, source, submit

VALUES: dict[str, Any] = {
    "tenant": "acme",
    "name": "nightly",
    "source": "/contracts",
    "questions": "/checklist.yaml",
    "variables": {},
    "params": {"seed": 0},
    "reading": {},
    "model": "tiny",
    "at": "0 1 * * *",
    "time_zone": "Asia/Shanghai",
}


@pytest.fixture
def schedule_id(database: Database) -> int:
    with database.writing() as session:
        add_schedule(session, VALUES, NOW)
        return require_schedule(session, "acme", "nightly").schedule_id


def try_run(database: Database, schedule_id: int, owner: str, seconds: float = 0, **changes: str) -> int | None:
    named = {"kind": "answers", "occurrence": "2026-11-04T01:00", **changes}
    with database.writing() as session:
        return claim_run(session, schedule_id, **named, due_at=NOW, owner=owner, now=later(seconds), lease_s=60)


def test_an_occurrence_is_run_once_however_many_race(database: Database, schedule_id: int) -> None:
    def run(number: int) -> bool:
        run_id = try_run(database, schedule_id, f"beat-{number}")
        if run_id is None:
            return False
        with database.writing() as session:
            return finish_run(session, run_id, f"beat-{number}", later(1), job_id="job")

    assert sum(race(run, 6)) == 1
    assert try_run(database, schedule_id, "late", 1000) is None
    with database.reading() as session:
        (row,) = schedule_runs(session, schedule_id, 10)
    assert (row.job_id, row.finished_at, row.owner) == ("job", later(1), None)


def test_what_a_dead_beat_held_is_taken_over_and_its_late_word_is_not_heard(
    database: Database, schedule_id: int
) -> None:
    run_id = try_run(database, schedule_id, "dead")
    assert run_id is not None
    assert try_run(database, schedule_id, "next", 60) is None
    assert try_run(database, schedule_id, "next", 61) == run_id

    with database.writing() as session:
        assert not finish_run(session, run_id, "dead", later(62), job_id="dead")
        give_back_run(session, run_id, "next")
    assert try_run(database, schedule_id, "third", 62) == run_id


def test_other_occurrences_and_kinds_are_other_runs(database: Database, schedule_id: int) -> None:
    assert try_run(database, schedule_id, "a") is not None
    assert try_run(database, schedule_id, "a", occurrence="2026-11-05T01:00") is not None
    assert try_run(database, schedule_id, "a", kind="prefill") is not None


def test_a_schedule_has_one_name_in_its_tenant(database: Database, schedule_id: int) -> None:
    with pytest.raises(ScheduleTaken), database.writing() as session:
        add_schedule(session, VALUES, NOW)
    with database.writing() as session:
        add_schedule(session, {**VALUES, "tenant": "other"}, NOW)
        pause_schedule(session, "acme", "nightly", later(1))
    with database.writing() as session:
        assert [row.paused_at for row in list_schedules(session, "acme")] == [later(1)]
        assert [row.paused_at for row in list_schedules(session, "other")] == [None]
        resume_schedule(session, "acme", "nightly", later(5))
        resume_schedule(session, "other", "nightly", later(5))
        assert [row.active_since for row in list_schedules(session, "acme")] == [later(5)]
        assert [row.active_since for row in list_schedules(session, "other")] == [NOW]


def test_a_removed_schedule_takes_its_history_with_it(database: Database, schedule_id: int) -> None:
    try_run(database, schedule_id, "a")
    with database.writing() as session:
        remove_schedule(session, "acme", "nightly")

    with database.reading() as session:
        assert schedule_runs(session, schedule_id, 10) == []
        with pytest.raises(ScheduleMissing):
            require_schedule(session, "acme", "nightly")


def test_new_work_is_what_no_earlier_job_of_the_model_answered(database: Database) -> None:
    submit(database, questions=2)
    first, _ = claim(database)
    with database.writing() as session:
        answer_item(session, first.item_id, owner="worker-1", answer=answer(), now=NOW)
    asked = [question(0), question(1), question(2, error_code="empty_question", error="Empty.")]
    both = [source(), source(OTHER_DOC, "b.pdf")]
    job_id = submit(database, sources=both, questions=asked)
    other = submit(database, sources=both, questions=asked, model="other")

    with database.reading() as session:
        found, unlike = new_work(session, job_id), new_work(session, other)

    assert (found.items, found.answered_before) == (3, 1)
    assert found.documents == {DOC: 1000, OTHER_DOC: 1000}
    assert (unlike.items, unlike.answered_before) == (4, 0)
