"""What a cluster promises, with a tiny model so that each case takes seconds."""

import signal
from pathlib import Path

import pytest

from tests.system.conftest import Installation


@pytest.fixture
def crew(cluster: Installation, tiny_model: Path) -> Installation:
    cluster.environment["PLATEMAKER_MODEL"] = str(tiny_model)
    return cluster


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
