"""What a cluster promises, with a tiny model so that each case takes seconds."""

import signal
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import func, select

from storage.database import Database
from storage.schema import ItemRow, ItemState, SnapshotLeaseRow, SnapshotRow, SnapshotState, WorkerRow
from storage.settings import StorageSettings
from tests.system.conftest import Installation


@pytest.fixture
def crew(cluster: Installation, tiny_model: Path) -> Installation:
    cluster.environment["PLATEMAKER_MODEL"] = str(tiny_model)
    return cluster


def rows_of(crew: Installation) -> Database:
    return Database(StorageSettings(database_url=SecretStr(crew.environment["PLATEMAKER_DATABASE_URL"])))


def contract(folder: Path, name: str, articles: int = 20) -> Path:
    path = folder / name
    path.write_text("".join(f"Article {n}. {name} delivers part {n} within {n} days.\n" for n in range(articles)))
    return path


def test_work_submitted_while_the_broker_was_down_is_found_in_the_rows(crew: Installation) -> None:
    broker = crew.environment["PLATEMAKER_BROKER_URL"]
    crew.environment["PLATEMAKER_BROKER_URL"] = "redis://127.0.0.1:9/0"
    submitted = crew.command("submit", contract(crew.folder, "a.txt"), "-q", "What?")
    assert submitted.returncode == 0
    assert "The job is safe" in submitted.stderr
    crew.environment["PLATEMAKER_BROKER_URL"] = broker
    crew.start("worker", "all")

    watched = crew.command("watch", submitted.stdout.strip(), timeout_s=90)

    assert watched.returncode == 0, watched.stdout + watched.stderr


def test_cancel_works_with_the_workers_down(crew: Installation) -> None:
    job_id = crew.command("submit", contract(crew.folder, "a.txt"), "-q", "What?", "-q", "When?").stdout.strip()

    cancelled = crew.command("cancel", job_id)

    assert "cancelled: 2 of 2 done (2 cancelled)" in cancelled.stdout
    assert crew.command("watch", job_id).returncode == 5
    assert {row["state"] for row in crew.report(job_id)} == {"cancelled"}


def test_a_killed_prefill_worker_is_replaced(crew: Installation) -> None:
    files = [contract(crew.folder, f"{n}.txt", 60) for n in range(4)]
    job_id = crew.command("submit", *files, "-q", "What?").stdout.strip()
    prefill = crew.start("worker", "prefill")
    crew.start("worker", "decode")
    crew.wait_until(
        lambda: crew.json("status", job_id, "--json")["items"].get("answered", 0) >= 1, limit_s=60, what="an answer"
    )
    prefill.send_signal(signal.SIGKILL)
    prefill.wait()
    crew.start("worker", "prefill")

    assert crew.command("watch", job_id, timeout_s=90).returncode == 0
    assert {row["state"] for row in crew.report(job_id)} == {"answered"}


def test_a_decode_worker_told_to_stop_ends_well_and_holds_nothing(crew: Installation) -> None:
    crew.environment |= {"PLATEMAKER_MAX_BATCH": "2", "PLATEMAKER_LEASE_S": "60"}
    questions = [part for n in range(40) for part in ("-q", f"What does article {n} say?")]
    crew.start("worker", "prefill")
    decode = crew.start("worker", "decode")
    submit = ("submit", contract(crew.folder, "a.txt"), *questions, "--max-tokens", "64", "--ignore-eos")
    job_id = crew.command(*submit).stdout.strip()
    with closing(rows_of(crew)) as database:

        def answered() -> int:
            with database.reading() as session:
                return session.scalar(select(func.count()).where(ItemRow.state == ItemState.ANSWERED)) or 0

        crew.wait_until(lambda: answered() >= 2, limit_s=180, what="the first answers")
        decode.send_signal(signal.SIGTERM)

        assert decode.wait(timeout=60) == 0
        with database.reading() as session:
            states = Counter(map(tuple, session.execute(select(ItemRow.state, ItemRow.attempts, ItemRow.owner))))
            assert not session.scalars(select(SnapshotLeaseRow)).all()
            assert session.scalars(select(WorkerRow.pool)).all() == ["prefill"]
    queued = states.pop((ItemState.QUEUED, 0, None))
    assert states == {(ItemState.ANSWERED, 1, None): 40 - queued} and queued
    crew.start("worker", "decode")
    assert crew.command("watch", job_id, timeout_s=170).returncode == 0


def test_a_prefill_worker_told_to_stop_ends_well_and_the_next_goes_on_behind_its_chunks(crew: Installation) -> None:
    crew.environment |= {"PLATEMAKER_CHUNK_TOKENS": "16", "PLATEMAKER_LEASE_S": "60"}
    prefill = crew.start("worker", "prefill")
    crew.start("worker", "decode")
    job_id = crew.command("submit", contract(crew.folder, "a.txt", 70), "-q", "What?").stdout.strip()
    with closing(rows_of(crew)) as database:

        def snapshot() -> SnapshotRow | None:
            with database.reading() as session:
                return session.scalars(select(SnapshotRow)).one_or_none()

        crew.wait_until(lambda: (row := snapshot()) is not None and row.done_tokens > 0, limit_s=180, what="a chunk")
        prefill.send_signal(signal.SIGTERM)

        assert prefill.wait(timeout=60) == 0
        left = snapshot()
        assert left is not None
        assert (left.state, left.owner, left.attempts) == (SnapshotState.WRITING, None, 0), "it was stopped too late"
        crew.start("worker", "prefill")
        assert crew.command("watch", job_id, timeout_s=170).returncode == 0
        made = snapshot()
        assert made is not None and made.computed_tokens <= made.num_tokens - left.done_tokens


def test_doctor_uses_every_real_server(crew: Installation) -> None:
    done = crew.command("doctor")

    assert done.returncode == 0, done.stdout
    assert "put and get agree" in done.stdout
    assert "copies in" in done.stdout
    assert "FAIL" not in done.stdout


def test_doctor_names_what_fails_and_shows_no_secret(crew: Installation) -> None:
    crew.environment["PLATEMAKER_S3_SECRET_ACCESS_KEY"] = "not-the-secret"
    crew.environment["PLATEMAKER_BROKER_URL"] = "redis://:hunter2@127.0.0.1:9/0"

    done = crew.command("doctor")

    assert done.returncode == 4
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in failed] == ["store", "broker"]
    assert "hunter2" not in done.stdout + done.stderr
    assert "not-the-secret" not in done.stdout + done.stderr
