"""The whole stack of `platemaker up`, as an operator uses it: jobs, doctor, Flower, metrics, and no secret anywhere."""

import base64
import json
import re
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.conftest import Installation

TEXT = "".join(f"Article {n}. The Supplier delivers part {n} within {n} days.\n" for n in range(30))
READY_S = 180


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Installation]:
    """One stack for the tests below, which only add to it."""
    folder = tmp_path_factory.mktemp("stack")
    settings = {"PLATEMAKER_DATA_DIR": str(folder / "data"), "PLATEMAKER_MODEL": str(tiny_model)}
    installation = Installation(settings, folder)
    up = installation.start("up", "--json")
    log = folder / "up-0.log"
    began = time.monotonic()
    while '"event": "ready"' not in log.read_text():
        assert up.poll() is None and time.monotonic() - began < READY_S, log.read_text()
        time.sleep(0.1)
    lines = installation.command("up", "--print-env").stdout.splitlines()
    for line in lines:
        name, value = shlex.split(line)[1].split("=", 1)
        installation.environment[name] = value
    yield installation
    assert installation.command("down").returncode == 0
    assert up.wait(timeout=60) == 0
    installation.stop_all()


def address(stack: Installation, name: str) -> str:
    events = [json.loads(line) for line in (stack.folder / "up-0.log").read_text().splitlines() if line[:1] == "{"]
    return str(next(event["address"] for event in reversed(events) if event.get("name") == name))


def secrets_of(stack: Installation) -> list[str]:
    environment = stack.environment
    found = [environment["PLATEMAKER_S3_SECRET_ACCESS_KEY"], environment["PLATEMAKER_FLOWER_AUTH"].split(":")[1]]
    found += re.findall(r"redis://:([^@]+)@", environment["PLATEMAKER_BROKER_URL"])
    assert len(found) == 3 and min(map(len, found)) > 20
    return found


def asked(url: str, login: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url)
    if login:
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


@pytest.fixture(scope="module")
def worked(stack: Installation) -> str:
    """A job that was answered."""
    (stack.folder / "a.txt").write_text(TEXT)
    job_id = stack.command("submit", "a.txt", "-q", "What?", "-q", "When?", "--max-tokens", "4").stdout.strip()
    watched = stack.command("watch", job_id)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    return job_id


def test_the_doctor_sends_a_task_through_every_queue_and_back(stack: Installation) -> None:
    done = stack.command("doctor", "--cluster", "--json")

    checks = {check["name"]: check for check in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stdout
    assert "answered by" in checks["prefill.batch"]["detail"] and "answered by" in checks["decode.batch"]["detail"]
    assert checks["workers"]["detail"] == "1 decode, 1 prefill"
    assert {"clocks", "versions", "models"} <= {*checks}


def test_flower_asks_for_the_password_and_shows_ids_and_numbers(stack: Installation, worked: str) -> None:
    flower, login = address(stack, "flower"), stack.environment["PLATEMAKER_FLOWER_AUTH"]
    assert asked(f"{flower}/tasks")[0] == asked(f"{flower}/api/tasks", "platemaker:wrong")[0] == 401

    def rows() -> list[dict[str, Any]]:
        return list(json.loads(asked(f"{flower}/api/tasks", login)[1]).values())

    finished = ["platemaker.decode", "platemaker.prefill"]
    stack.wait_until(
        lambda: sorted({row["name"] for row in rows() if row["state"] == "SUCCESS"} - {"platemaker.ping"}) == finished,
        limit_s=60,
        what="Flower's list",
    )
    (decode,) = [row["uuid"] for row in rows() if row["name"] == "platemaker.decode"]
    status, page = asked(f"{flower}/task/{decode}", login)
    assert status == 200 and re.search(r"document [0-9a-f]{12}, [\d,]+ tokens, loaded", page)
    assert "Supplier" not in page

    def broker_page_names_the_queues() -> bool:  # once Flower has asked the workers for them
        page = asked(f"{flower}/broker", login)[1]
        return "prefill.batch" in page and "decode.batch" in page

    stack.wait_until(broker_page_names_the_queues, limit_s=60, what="Flower's queues")


def test_workers_and_exporter_serve_what_they_count(stack: Installation, worked: str) -> None:
    prefill = asked(f"{address(stack, 'prefill-1')}/metrics")[1]
    exporter = asked(f"{address(stack, 'exporter')}/metrics")[1]

    assert re.search(r"^platemaker_prefill_seconds_count 1\.0$", prefill, re.MULTILINE)
    assert re.search(r'^platemaker_exporter_up\{source="broker"\} 1\.0$', exporter, re.MULTILINE)
    assert re.search(r'^platemaker_workers\{pool="decode"\} 1\.0$', exporter, re.MULTILINE)


def test_no_secret_is_in_a_command_line_a_log_or_a_page(stack: Installation, worked: str) -> None:
    hidden = secrets_of(stack)
    flower, login = address(stack, "flower"), stack.environment["PLATEMAKER_FLOWER_AUTH"]
    worker = next(iter(json.loads(asked(f"{flower}/api/workers?refresh=1", login)[1])))
    places = {path: asked(f"{flower}/{path}", login)[1] for path in ("workers", "tasks", "broker", f"worker/{worker}")}
    places |= {str(path): path.read_text(errors="replace") for path in stack.folder.rglob("*.log")}
    for process in psutil.process_iter(["cmdline"]):
        places[f"process {process.pid}"] = " ".join(process.info["cmdline"] or ())

    assert len([name for name in places if name.endswith(".log")]) >= 6
    for name, text in places.items():
        assert not [secret for secret in hidden if secret in text], name
