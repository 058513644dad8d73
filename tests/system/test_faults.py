"""Store and disk in trouble, as a person meets it: one sentence, the exit code, and nothing lost."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.faulty import Fault, Faulty, faulty
from tests.system.conftest import Installation

UNUSABLE = 4
TWENTY_MINUTES_OFF = """
import datetime
import botocore.auth
now = botocore.auth.get_current_datetime
botocore.auth.get_current_datetime = lambda *args, **kw: now(*args, **kw) - datetime.timedelta(minutes=20)
"""


@pytest.fixture
def proxy(cluster: Installation) -> Iterator[Faulty]:
    with faulty(cluster.environment["PLATEMAKER_S3_ENDPOINT_URL"]) as told:
        yield told


@pytest.fixture
def crew(cluster: Installation, proxy: Faulty, tiny_model: Path) -> Installation:
    """A cluster whose store is reached through the proxy, and is not waited for."""
    cluster.environment |= {
        "PLATEMAKER_MODEL": str(tiny_model),
        "PLATEMAKER_S3_ENDPOINT_URL": proxy.endpoint_url,
        "PLATEMAKER_PATIENCE_S": "0",
        "PLATEMAKER_LEASE_S": "2",
        "PLATEMAKER_UPKEEP_S": "0.5",
    }
    return cluster


def contract(folder: Path) -> Path:
    path = folder / "a.txt"
    path.write_text("".join(f"Article {n}. The Supplier delivers part {n} within {n} days.\n" for n in range(20)))
    return path


def test_each_command_says_in_one_sentence_what_is_wrong_with_the_store(
    crew: Installation, proxy: Faulty, tmp_path: Path
) -> None:
    crew.warm = None  # the clock is turned while Python starts
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(TWENTY_MINUTES_OFF)
    path = os.pathsep.join([str(tmp_path / "clock"), os.environ.get("PYTHONPATH", "")])
    faults: dict[str, tuple[dict[str, str], Fault]] = {
        "There is no bucket elsewhere.": ({"PLATEMAKER_STORE_URL": "s3://elsewhere"}, Fault()),
        "PLATEMAKER_S3_SECRET_ACCESS_KEY": ({"PLATEMAKER_S3_SECRET_ACCESS_KEY": "wrong"}, Fault()),
        "clock": ({"PYTHONPATH": path}, Fault()),
        "Set PLATEMAKER_S3_REGION to eu-west-1": (
            {},
            Fault(status=400, code="AuthorizationHeaderMalformed", more="<Region>eu-west-1</Region>"),
        ),
        "PLATEMAKER_S3_ENDPOINT_URL": ({"PLATEMAKER_S3_ENDPOINT_URL": "http://127.0.0.1:9"}, Fault()),
        "SlowDown (503)": ({}, Fault(status=503, code="SlowDown")),
    }
    right = dict(crew.environment)
    for sentence, (change, fault) in faults.items():
        crew.environment = right | change
        proxy.fail(fault)
        for command in (("submit", contract(crew.folder), "-q", "What?"), ("sweep",)):
            done = crew.command(*command)
            assert done.returncode == UNUSABLE, done.stderr
            assert sentence in done.stderr
            assert len(done.stderr.splitlines()) == 1
    crew.environment = right
    proxy.heal()
    assert crew.command("jobs").stdout == ""  # nothing was begun


@pytest.mark.parametrize("command", [("run", "a.txt", "-q", "What?"), ("worker", "all")], ids=["run", "worker"])
def test_what_begins_to_work_checks_the_store_first(crew: Installation, command: tuple[str, ...]) -> None:
    contract(crew.folder)
    crew.environment["PLATEMAKER_S3_ACCESS_KEY_ID"] = "wrong"

    done = crew.command(*command)

    assert done.returncode == UNUSABLE
    assert done.stderr.startswith("The object store refused these credentials.")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503, code="SlowDown", method="GET"), Fault(status=403, code="AccessDenied", method="GET")],
    ids=lambda fault: fault.code,
)
def test_a_worker_lives_through_an_outage_and_goes_on_by_itself(
    crew: Installation, proxy: Faulty, fault: Fault
) -> None:
    crew.start("worker", "all")
    log = crew.folder / "worker-0.log"
    crew.wait_until(lambda: "ready." in log.read_text(), limit_s=120, what="starting the worker")
    proxy.fail(fault)  # reading only: submit writes
    job_id = crew.command("submit", contract(crew.folder), "-q", "What?", "-q", "When?").stdout.strip()
    crew.wait_until(lambda: "The work is given back" in log.read_text(), limit_s=60, what="an outage")
    waiting = crew.json("status", job_id, "--json")["items"]
    proxy.heal()

    assert crew.command("watch", job_id, timeout_s=120).returncode == 0
    assert waiting.get("failed", 0) == 0
    assert {row["state"] for row in crew.report(job_id)} == {"answered"}
    assert "Traceback" not in log.read_text()


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="the full disk is a limit on the size of files")
def test_a_run_whose_disk_is_full_keeps_its_job_for_the_next_run(laptop: Installation) -> None:
    file = contract(laptop.folder)
    laptop.environment["PLATEMAKER_CHUNK_TOKENS"] = "4096"  # one large chunk
    assert laptop.command("db", "upgrade").returncode == 0

    full = laptop.command("run", file, "-q", "What?", under=("prlimit", "--fsize=1000000"))

    assert full.returncode == UNUSABLE, full.stdout + full.stderr
    assert "set PLATEMAKER_STORE_URL or PLATEMAKER_DATA_DIR to another folder" in full.stderr
    assert "Traceback" not in full.stderr
    (job_id,) = [line.split()[0] for line in laptop.command("jobs").stdout.splitlines()]
    assert laptop.json("status", job_id, "--json")["items"] == {"queued": 1}
    assert laptop.command("run", file, "-q", "What?").returncode == 0
    assert laptop.json("status", job_id, "--json")["items"] == {"answered": 1}
