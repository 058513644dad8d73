"""The real thing: Valkey, SeaweedFS, PostgreSQL, separate prefill and decode workers, the real model."""

import logging
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.system.conftest import SAMPLES, Installation

pytestmark = pytest.mark.model
logger = logging.getLogger(__name__)


def first_pages(folder: Path, name: str, *, first: int, pages: int) -> Path:
    """A contract of a few pages of the sample, so that one CPU core reads it in seconds."""
    parts = (SAMPLES / "supply-agreement.txt").read_text().split("\f")[first : first + pages]
    path = folder / name
    path.write_text("\f".join(parts))
    return path


def twelve_questions(folder: Path) -> Path:
    lines = (SAMPLES / "checklist.yaml").read_text().splitlines()
    path = folder / "twelve.yaml"
    path.write_text("\n".join(lines[: 2 + 3 * 12]) + "\n")
    return path


def answers(rows: list[dict[str, object]]) -> list[object]:
    return [row["answer"] for row in rows]


def test_a_killed_decode_worker_costs_no_row_and_repeats_none(cluster: Installation, real_model: Path) -> None:
    cluster.environment["PLATEMAKER_MODEL"] = str(real_model)
    cluster.environment["PLATEMAKER_MAX_BATCH"] = "4"
    files = [
        first_pages(cluster.folder, "first.txt", first=0, pages=2),
        first_pages(cluster.folder, "second.txt", first=4, pages=2),
    ]
    questions = twelve_questions(cluster.folder)
    cluster.start("worker", "prefill")
    decoder = cluster.start("worker", "decode")
    submitted = cluster.command("submit", *files, "--questions", questions, "--max-tokens", "16")
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()

    def answered() -> int:
        items = cluster.json("status", job_id, "--json")["items"]
        return int(items.get("answered", 0))

    cluster.wait_until(lambda: answered() >= 3, limit_s=120, what="the first answers")
    decoder.send_signal(signal.SIGKILL)
    decoder.wait()
    before = [row for row in cluster.report(job_id) if row["state"] == "answered"]
    cluster.start("worker", "decode")
    finished_s = cluster.wait_until(lambda: answered() == 24, limit_s=60, what="finishing after the kill")

    rows = cluster.report(job_id)
    assert 3 <= len(before) < 24, "the kill came too late to show anything"
    assert len(rows) == 24
    assert Counter(row["state"] for row in rows) == {"answered": 24}
    assert len({(row["document"], row["question_id"]) for row in rows}) == 24
    for row in before:  # to the last digit of its time: nothing finished was done again
        assert row in rows
    assert cluster.command("watch", job_id).returncode == 0
    logger.info("%d answers before the kill, the rest %.1f s after it", len(before), finished_s)

    # The same job in one process with a folder and SQLite gives the same text: the way over S3 changed nothing.
    alone = Installation(
        {
            "PLATEMAKER_DATA_DIR": str(cluster.folder / "alone"),
            "PLATEMAKER_MODEL": str(real_model),
        },
        cluster.folder,
    )
    done = alone.command("run", *files, "--questions", questions, "--max-tokens", "16", "--out", "alone-out")
    assert done.returncode == 0, done.stderr
    job = alone.command("jobs").stdout.split()[0]
    assert answers(alone.report(job)) == answers(rows)
