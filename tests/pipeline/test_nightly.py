"""Schedules from files to jobs, on SQLite and a folder store."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from pipeline.documents import AS_USUAL, Normalise, ReadOptions
from pipeline.errors import ScheduleError
from pipeline.local_servers import SeaweedFS
from pipeline.nightly.occurrences import Occurrence, last_due, next_due, time_zone
from pipeline.nightly.runs import Nightly, Ran
from pipeline.nightly.sources import is_visible, sources_of
from pipeline.settings import PipelineSettings
from storage.database import Database
from storage.documents import get_text
from storage.errors import QueueFull
from storage.items import NewAnswer, answer_item, claim_items
from storage.job_report import job_report
from storage.objects import FolderStore
from storage.objects.s3 import S3Store
from storage.progress import job_status
from storage.schedules import (
    add_schedule,
    list_schedules,
    pause_schedule,
    require_schedule,
    resume_schedule,
    schedule_runs,
)
from storage.schema import ScheduleRow, SectionRow, SnapshotState
from storage.settings import StorageSettings
from storage.snapshots import find_or_create, note_readings
from storage.tiers import Tier
from tests.storage.made_rows import fingerprint

BERLIN, SHANGHAI = "Europe/Berlin", "Asia/Shanghai"
DUE = datetime(2026, 11, 3, 17, 0, tzinfo=UTC)  # one at night in Shanghai
PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "stop": [], "ignore_eos": False}


def at(hour: int, minute: int = 0, *, month: int, day: int) -> datetime:
    return datetime(2026, month, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "zone", "now", "name", "due_at"),
    [
        ("0 1 * * *", SHANGHAI, at(17, month=11, day=3), "2026-11-04T01:00", at(17, month=11, day=3)),
        ("0 1 * * *", SHANGHAI, at(16, 59, month=11, day=3), "2026-11-03T01:00", at(17, month=11, day=2)),
        # On 29 March 2026, half past two does not exist in Berlin: it is half past three.
        ("30 2 * * *", BERLIN, at(1, 29, month=3, day=29), "2026-03-28T02:30", at(1, 30, month=3, day=28)),
        ("30 2 * * *", BERLIN, at(1, 30, month=3, day=29), "2026-03-29T02:30", at(1, 30, month=3, day=29)),
        ("30 2 * * *", BERLIN, at(9, month=3, day=29), "2026-03-29T02:30", at(1, 30, month=3, day=29)),
        # On 25 October 2026 it is there twice; the first counts.
        ("30 2 * * *", BERLIN, at(0, 30, month=10, day=25), "2026-10-25T02:30", at(0, 30, month=10, day=25)),
        ("30 2 * * *", BERLIN, at(1, 30, month=10, day=25), "2026-10-25T02:30", at(0, 30, month=10, day=25)),
        ("30 2 * * *", BERLIN, at(9, month=10, day=25), "2026-10-25T02:30", at(0, 30, month=10, day=25)),
    ],
)
def test_occurrences_are_local_times_that_happen_once(
    line: str, zone: str, now: datetime, name: str, due_at: datetime
) -> None:
    found = last_due(line, time_zone(zone), now)

    assert found is not None
    assert (found.name, found.due_at) == (name, due_at)


@pytest.mark.parametrize("zone", [BERLIN, SHANGHAI])
@pytest.mark.parametrize("line", ["30 2 * * *", "*/20 1-3 * * *"])
def test_walking_through_a_year_of_clock_changes_meets_each_occurrence_once(line: str, zone: str) -> None:
    names, now = [], at(0, month=1, day=1)
    while now < at(0, month=12, day=31):
        found = next_due(line, time_zone(zone), now)
        assert found is not None and found.due_at > now
        latest = last_due(line, time_zone(zone), found.due_at)
        assert latest is not None and latest.due_at <= found.due_at
        names.append(latest.name)
        now = found.due_at if "/" not in line else found.due_at + timedelta(days=13)

    assert len(set(names)) == len(names)


@pytest.mark.parametrize("line", ["nightly", "0 25 * * *", "* * *"])
def test_what_is_no_cron_line_is_told(line: str) -> None:
    with pytest.raises(ScheduleError, match="no cron line"):
        last_due(line, time_zone(BERLIN), DUE)


def test_what_is_no_time_zone_is_told() -> None:
    with pytest.raises(ScheduleError, match="no time zone"):
        time_zone("Mars/Olympus")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "contracts"
    folder.mkdir()
    (folder / "a.txt").write_text("The fee is due within 30 days.")
    (folder / "b.txt").write_text("The fee is due within 60 days.")
    (folder / "notes.xls").write_text("not a contract")
    (tmp_path / "checklist.txt").write_text("When is it due?\n")
    return folder


@pytest.fixture
def nightly(tmp_path: Path, folder: Path) -> Iterator[Nightly]:
    storage = StorageSettings(data_dir=tmp_path / "data")
    database = Database(storage)
    database.upgrade()
    values: dict[str, Any] = {
        "tenant": "default",
        "name": "nightly",
        "source": str(folder),
        "questions": str(tmp_path / "checklist.txt"),
        "variables": {},
        "params": PARAMS,
        "reading": asdict(AS_USUAL),
        "model": "tiny",
        "at": "0 1 * * *",
        "time_zone": SHANGHAI,
        "answer_by_s": 6 * 3600.0,
    }
    with database.writing() as session:
        add_schedule(session, values, DUE - timedelta(hours=1))
    yield Nightly(database, FolderStore(tmp_path / "objects"), PipelineSettings(), storage)
    database.close()


def answer_all(nightly: Nightly, ran: Ran, *, total_s: float = 1.0) -> None:
    """As workers would: every document read in a second, one token an answer."""
    with nightly.database.reading() as session:
        documents = {row.document_id for row in job_report(session, "default", str(ran.job_id)) if row.document_id}
    for document_id in documents:
        with nightly.database.writing() as session:
            row = find_or_create(session, fingerprint(tenant="default", document_id=document_id), num_tokens=9, now=DUE)
            row.state = SnapshotState.READY
            note_readings(session, row, model="tiny", computed_tokens=9, prefill_s=1.0, now=DUE)
            taken = claim_items(
                session,
                tenant="default",
                document_id=document_id,
                model="tiny",
                owner="w",
                limit=99,
                now=DUE,
                lease_s=60,
            )
            for item in taken:
                given = NewAnswer("30 days", "stop", None, 9, 9, 1, 0.1, total_s, "w")
                answer_item(session, item.item_id, owner="w", answer=given, now=DUE)


def test_a_schedule_is_submitted_once_when_it_is_due(nightly: Nightly) -> None:
    assert nightly.tick(DUE - timedelta(minutes=1)) == []

    (ran,) = nightly.tick(DUE + timedelta(seconds=30))

    assert nightly.tick(DUE + timedelta(minutes=9)) == []
    assert (ran.kind, ran.documents, ran.new_items, ran.carried_items, ran.error) == ("answers", 2, 2, 0, None)
    with nightly.database.reading() as session:
        status = job_status(session, "default", str(ran.job_id))
        (row,) = schedule_runs(session, list_schedules(session, "default")[0].schedule_id, 9)
    assert (row.job_id, row.occurrence) == (ran.job_id, "2026-11-04T01:00")
    assert status.total == 2
    assert status.answer_by == DUE + timedelta(hours=6)


def test_a_night_counts_what_is_new_and_what_an_earlier_one_answered(nightly: Nightly, folder: Path) -> None:
    (first,) = nightly.tick(DUE)
    answer_all(nightly, first)
    (folder / "b.txt").write_text("The fee is due within 90 days.")
    (folder / "c.txt").write_text("No fee is due.")

    (second,) = nightly.tick(DUE + timedelta(days=1))

    assert (second.documents, second.new_items, second.carried_items) == (3, 2, 1)


def test_only_the_newest_missed_night_is_made_up_for_and_none_after_its_answer_by(nightly: Nightly) -> None:
    (late,) = nightly.tick(DUE + timedelta(days=3, hours=5))
    (missed,) = nightly.tick(DUE + timedelta(days=4, hours=6))

    assert late.job_id is not None and late.occurrence == "2026-11-07T01:00"
    assert missed.job_id is None and "Missed" in str(missed.error)


def test_a_paused_schedule_misses_its_nights(nightly: Nightly) -> None:
    with nightly.database.writing() as session:
        pause_schedule(session, "default", "nightly", DUE - timedelta(minutes=5))
    assert nightly.tick(DUE) == []

    with nightly.database.writing() as session:
        resume_schedule(session, "default", "nightly", DUE + timedelta(minutes=5))

    assert nightly.tick(DUE + timedelta(minutes=6)) == []
    assert len(nightly.tick(DUE + timedelta(days=1))) == 1


def test_a_machine_that_does_not_see_the_files_leaves_the_run_to_others(nightly: Nightly, folder: Path) -> None:
    away = folder.rename(folder.with_name("elsewhere"))
    assert nightly.tick(DUE) == []

    away.rename(folder)

    assert len(nightly.tick(DUE)) == 1


def test_a_run_that_is_cut_off_is_done_by_the_next_and_submits_one_job(
    nightly: Nightly, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Nightly, "_estimated", killed)  # the job is there, the run does not know it
        nightly.tick(DUE)

    (ran,) = nightly.tick(DUE)
    with nightly.database.reading() as session:
        assert job_status(session, "default", str(ran.job_id)).total == 2


def test_a_night_for_which_there_is_no_room_is_refused_and_tried_again(nightly: Nightly) -> None:
    full = replace(nightly, storage=nightly.storage.model_copy(update={"max_queued_items": 1}))

    (refused,) = full.tick(DUE)

    assert refused.job_id is None and refused.error is not None
    assert "would go beyond the bound of 1" in refused.error
    assert nightly.tick(DUE) == []  # not at once
    with nightly.database.writing() as session:
        (row,) = schedule_runs(session, list_schedules(session, "default")[0].schedule_id, 9)
        assert (row.error, row.finished_at, row.job_id) == (refused.error, None, None)
        row.lease_until = DUE
    (ran,) = nightly.tick(DUE + timedelta(minutes=6))
    assert ran.job_id is not None and ran.error is None
    with nightly.database.reading() as session:
        (row,) = schedule_runs(session, list_schedules(session, "default")[0].schedule_id, 9)
    assert (row.error, row.job_id) == (None, ran.job_id)


def test_a_run_by_hand_for_which_there_is_no_room_is_refused(nightly: Nightly) -> None:
    full = replace(nightly, storage=nightly.storage.model_copy(update={"max_queued_items": 1}))
    with nightly.database.reading() as session:
        (schedule,) = list_schedules(session, "default")

    with pytest.raises(QueueFull):
        full.run_now(schedule, DUE)

    with nightly.database.reading() as session:
        (row,) = schedule_runs(session, schedule.schedule_id, 9)
    assert row.error is not None and row.job_id is None


def test_a_night_has_the_tier_of_its_schedule(nightly: Nightly) -> None:
    with nightly.database.writing() as session:
        list_schedules(session, "default")[0].tier = Tier.FAST

    (ran,) = nightly.tick(DUE)

    with nightly.database.reading() as session:
        assert job_status(session, "default", str(ran.job_id)).tier == Tier.FAST


def test_a_question_file_that_became_wrong_is_the_run_s_error(nightly: Nightly, tmp_path: Path) -> None:
    (tmp_path / "checklist.txt").write_text("")

    (ran,) = nightly.tick(DUE)

    assert ran.job_id is None and "checklist.txt" in str(ran.error)


def test_a_night_that_is_too_short_is_told(nightly: Nightly, folder: Path) -> None:
    (first,) = nightly.tick(DUE)
    assert (first.expected_finish_at, first.warning) == (None, None)  # nothing was measured yet
    answer_all(nightly, first, total_s=5 * 3600.0)
    for name in ("c.txt", "d.txt", "e.txt"):
        (folder / name).write_text(f"Another contract, {name}.")

    with nightly.database.reading() as session:
        (schedule,) = list_schedules(session, "default")
    ran = nightly.run(schedule, "answers", Occurrence("now", datetime.now(UTC)), datetime.now(UTC))

    # Two tokens in five hours, so seven and a half for three answers; the answer-by is six away.
    assert ran is not None and ran.expected_finish_at is not None
    assert "The night is too short" in str(ran.warning)


def test_files_of_a_bucket_have_names_of_their_own(s3_server: SeaweedFS, tmp_path: Path) -> None:
    storage, settings = s3_server.settings(), PipelineSettings()
    source = "s3://platemaker/inbox"
    with pytest.raises(ScheduleError, match="no document"):
        sources_of(source, settings, storage)
    there = S3Store(storage.model_copy(update={"store_url": "s3://platemaker"}))
    client = there._connection().client
    for name in ("inbox/Lieferung März 1.txt", "inbox/2026/b.txt", "elsewhere/d.txt"):
        client.put_object(Bucket="platemaker", Key=name, Body=name.encode())

    found = sources_of(source, settings, storage)

    assert [each.name for each in found] == [f"{source}/2026/b.txt", f"{source}/Lieferung März 1.txt"]
    assert is_visible(source, "nda")
    assert not is_visible(source, str(tmp_path / "q.txt"))
    there.close()


def test_a_schedule_keeps_its_playbook_its_values_and_how_files_are_read(nightly: Nightly, tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text("- question: Who is {party}?\n  type: yes_no\n")
    (tmp_path / "contracts/a.txt").write_text("a\n\n\n\n\nb")
    with nightly.database.writing() as session:
        row = list_schedules(session, "default")[0]
        row.questions, row.variables = str(tmp_path / "q.yaml"), {"party": "Acme"}
        row.reading = asdict(ReadOptions(normalise=Normalise.FURNITURE))

    (ran,) = nightly.tick(DUE)

    with nightly.database.reading() as session:
        first = next(job_report(session, "default", str(ran.job_id)))
    assert "Who is Acme?" in first.question and first.spec["type"] == "yes_no"
    assert first.document_id is not None
    assert get_text(nightly.store, "default", first.document_id).split("\n") == ["a", "b"]


def test_a_night_that_reads_beforehand_cuts_the_sections_that_are_asked_later(
    nightly: Nightly, folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "long.txt").write_text("The fee is due within 30 days. " * 300)
    schedule = the_schedule(nightly)
    schedule.split, schedule.model = "sections", tiny_model.name
    monkeypatch.setenv("PLATEMAKER_MODEL", str(tiny_model))

    runs = [nightly.run(schedule, kind, Occurrence("2026-11-04T01:00", DUE), DUE) for kind in ("prefill", "answers")]

    with nightly.database.reading() as session:
        cuts = [
            [(row.section_id, row.start) for row in session.scalars(select(SectionRow).filter_by(job_id=ran.job_id))]
            for ran in runs
            if ran is not None
        ]
    assert len(cuts) == 2
    assert cuts[0] == cuts[1] and len(cuts[0]) > 1


def test_a_machine_with_another_model_does_not_cut(nightly: Nightly, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = the_schedule(nightly)
    schedule.split = "sections"
    monkeypatch.setenv("PLATEMAKER_MODEL", "/models/another")

    ran = nightly.run(schedule, "answers", Occurrence("2026-11-04T01:00", DUE), DUE)

    assert ran is not None and ran.job_id is None and "another" in (ran.error or "")


def the_schedule(nightly: Nightly) -> ScheduleRow:
    with nightly.database.reading() as session:
        return require_schedule(session, "default", "nightly")
