"""The prefill pool and the store are really stopped: answers come all the same, say how, and the split comes back."""

import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import update

from pipeline.local_servers import SeaweedFS, seaweedfs
from pipeline.local_servers.process import free_ports
from storage.database import Database, utc_now
from storage.schema import JobRow
from storage.settings import StorageSettings
from tests.storage.faulty import Fault, Faulty, faulty
from tests.system.conftest import Installation, Process


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SeaweedFS]:
    """A store of this test's own, to stop."""
    with seaweedfs(tmp_path / "store", "platemaker") as server:
        yield server


@pytest.fixture
def crew(cluster: Installation, tiny_model: Path) -> Installation:
    cluster.environment |= {
        "PLATEMAKER_MODEL": str(tiny_model),
        "PLATEMAKER_PATIENCE_S": "0",
        "PLATEMAKER_LEASE_S": "2",
        "PLATEMAKER_UPKEEP_S": "0.5",
        "PLATEMAKER_BREAKER_FAILURES": "2",
        "PLATEMAKER_BREAKER_COOL_DOWN_S": "2",
    }
    return cluster


def start(crew: Installation, pool: str) -> Process:
    """Returns when the worker takes messages."""
    log = crew.folder / f"worker-{len(crew.processes)}.log"
    worker = crew.start("worker", pool)
    crew.wait_until(lambda: "ready." in log.read_text(), limit_s=400, what=f"starting {pool}")
    return worker


def contract(folder: Path, name: str) -> Path:
    path = folder / f"{name}.txt"
    path.write_text("".join(f"Article {n}. {name} delivers part {n} within {n} days.\n" for n in range(20)))
    return path


def ask(crew: Installation, names: str, *options: str) -> str:
    """One job about a document for each letter."""
    files = [contract(crew.folder, name) for name in names]
    done = crew.command("submit", *files, "-q", "What?", "-q", "When?", "-q", "Who?", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ways(crew: Installation, job_id: str) -> set[tuple[str, str]]:
    """How the job's answers came, once they all have."""
    watched = crew.command("watch", job_id, timeout_s=400)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    return {(row["way"], row["why"]) for row in crew.report(job_id)}


def test_an_absent_prefill_pool_is_done_without_until_it_comes_back(crew: Installation) -> None:
    start(crew, "decode")
    assert ways(crew, ask(crew, "a")) == {("fallback", "no_prefill_pool")}

    prefill = start(crew, "prefill")
    assert ways(crew, ask(crew, "b")) == {("split", "unmeasured")}

    prefill.send_signal(signal.SIGKILL)
    prefill.wait()
    assert ways(crew, ask(crew, "c")) == {("fallback", "no_prefill_pool")}
    shares = crew.json("stats", "--json")["ways"]
    assert {way: shares[way]["answers"] for way in shares} == {"split": 3, "one_piece": 0, "fallback": 6}
    assert shares["fallback"]["why"] == {"no_prefill_pool": 6}


def breaker(port: int) -> int:
    """Of the store, as the worker with this port says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r'^platemaker_breaker_state\{breaker="store"\} (\d)', text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def test_a_stopped_store_is_done_without_from_memory_and_used_again_when_it_is_back(
    crew: Installation, store: SeaweedFS
) -> None:
    (port,) = free_ports(1)
    crew.environment |= {
        "PLATEMAKER_STORE_URL": store.url,
        "PLATEMAKER_S3_ENDPOINT_URL": store.endpoint_url,
        "PLATEMAKER_S3_ACCESS_KEY_ID": store.access_key_id,
        "PLATEMAKER_S3_SECRET_ACCESS_KEY": store.secret_access_key,
    }
    start(crew, "prefill")
    crew.environment["PLATEMAKER_METRICS_PORT"] = str(port)
    start(crew, "decode")
    del crew.environment["PLATEMAKER_METRICS_PORT"]
    first = ask(crew, "a")
    assert ways(crew, first) == {("split", "unmeasured")}
    assert breaker(port) == 0
    again, unknown = (ask(crew, name, "--not-before", "1h") for name in "ab")

    store.kill()
    begin_now(crew)
    crew.wait_until(
        lambda: crew.json("status", again, "--json")["items"] == {"answered": 3}, limit_s=200, what="answers"
    )
    crew.wait_until(lambda: breaker(port) == 2, limit_s=200, what="opening the breaker")
    assert crew.json("status", unknown, "--json")["items"] == {"queued": 3}  # its text is in the store alone

    store.start()
    assert ways(crew, again) == {("split", "ready")}
    assert [row["answer"] for row in crew.report(again)] == [row["answer"] for row in crew.report(first)]
    assert len(ways(crew, unknown)) == 1
    crew.wait_until(lambda: breaker(port) == 0, limit_s=200, what="closing the breaker")
    until_split(crew, "c")


def begin_now(crew: Installation) -> None:
    """The time of the jobs that were to begin later has come."""
    url = crew.environment["PLATEMAKER_DATABASE_URL"]
    with closing(Database(StorageSettings(database_url=SecretStr(url)))) as database, database.writing() as session:
        session.execute(update(JobRow).where(JobRow.not_before.is_not(None)).values(not_before=utc_now()))


def until_split(crew: Installation, name: str) -> None:
    """Asks the same of a document until its answers come the split way."""
    crew.wait_until(
        lambda: {way for way, _ in ways(crew, ask(crew, name))} == {"split"}, limit_s=400, what="the split's return"
    )


@pytest.fixture
def proxy(crew: Installation) -> Iterator[Faulty]:
    with faulty(crew.environment["PLATEMAKER_S3_ENDPOINT_URL"]) as told:
        yield told


def start_behind(crew: Installation, proxy: Faulty) -> None:
    """A prefill worker that reaches the store through the proxy, and a decode worker that does not."""
    start(crew, "decode")
    reached = crew.environment["PLATEMAKER_S3_ENDPOINT_URL"]
    crew.environment["PLATEMAKER_S3_ENDPOINT_URL"] = proxy.endpoint_url
    start(crew, "prefill")
    crew.environment["PLATEMAKER_S3_ENDPOINT_URL"] = reached


def test_an_overloaded_prefill_pool_is_helped_with_what_waits_longest(crew: Installation, proxy: Faulty) -> None:
    crew.environment["PLATEMAKER_OVERLOAD_AGE_S"] = "1"
    start_behind(crew, proxy)
    proxy.fail(Fault(pause_s=2.0))  # many seconds for each document

    found = ways(crew, ask(crew, "abcdef"))

    assert ("fallback", "prefill_overloaded") in found
    assert {way for way, _ in found} == {"split", "fallback"}


def test_a_failing_prefill_pool_is_left_alone_and_tried_again(crew: Installation, proxy: Faulty) -> None:
    start_behind(crew, proxy)
    proxy.fail(Fault(status=503, code="SlowDown"))

    assert ways(crew, ask(crew, "a")) == {("fallback", "prefill_breaker")}

    proxy.heal()
    until_split(crew, "b")
    assert {way for way, _ in ways(crew, ask(crew, "c"))} == {"split"}
