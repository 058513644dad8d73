"""`platemaker up` without a model: what it starts, starts again, and never leaves behind."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import AlreadyUp, NotUp
from pipeline.local_servers import LocalServer
from pipeline.stack.deaths import ending
from pipeline.stack.member import FIRST_PAUSE_S, LONGEST_PAUSE_S, SETTLED_S, Member, State
from pipeline.stack.record import Record, RunningProcess

PLATEMAKER = Path(sys.executable).with_name("platemaker")
WAIT_S = 90


class Played(LocalServer):
    """A server whose life the test tells."""

    name = "played"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.code: int | None = None
        self.launches = 0

    def launch(self) -> None:
        self.code = None
        self.launches += 1

    def exit_code(self) -> int | None:
        return self.code

    def is_ready(self) -> bool:
        return True

    def _command(self) -> list[str | Path]:
        return []

    def _answers(self) -> bool:
        return True


def test_a_member_that_ends_is_started_again_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    now = [0.0]
    server = Played(tmp_path)
    member = Member(server, "here", clock=lambda: now[0])
    member.launch()
    pauses = []
    for _ in range(8):
        assert member.look() and member.state == State.READY
        server.code = -9
        assert member.look() and member.state == State.CRASHED
        pauses.append(member.waits_s)
        now[0] += member.waits_s
        assert member.look() and member.state == State.STARTING

    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S] and pauses[-1] == LONGEST_PAUSE_S
    assert member.restarts == 8 and server.launches == 9
    now[0] += SETTLED_S + 1
    server.code = 1
    member.look()
    assert member.waits_s == FIRST_PAUSE_S


def test_how_a_worker_ended_is_told_in_words() -> None:
    assert [ending(code) for code in (-signal.SIGKILL, -signal.SIGSEGV, 4)] == ["SIGKILL", "SIGSEGV", "status 4"]


def test_a_process_id_that_was_given_again_is_not_the_process(tmp_path: Path) -> None:
    ours = RunningProcess.of("test", os.getpid())
    assert ours is not None and ours.is_alive
    stranger = ours._replace(created=ours.created - 100)

    assert not stranger.is_alive
    stranger.send(signal.SIGKILL)  # or this test would not go on


def test_the_settings_are_quoted_for_the_shell_and_closed_to_others(tmp_path: Path) -> None:
    record = Record(tmp_path / "up")
    value = "a b'c\"$HOME"
    with record.held():
        record.write_settings({"PLATEMAKER_BROKER_URL": value})
        told = subprocess.run(
            ["/bin/sh", "-c", f'. {record.settings_file}; printf %s "$PLATEMAKER_BROKER_URL"'],
            capture_output=True,
            text=True,
            check=True,
        )
        with pytest.raises(AlreadyUp, match="platemaker down"), record.held():
            pass

    assert told.stdout == value
    assert stat.S_IMODE(record.settings_file.stat().st_mode) == 0o600


def test_where_nothing_runs_that_is_said(tmp_path: Path) -> None:
    record = Record(tmp_path / "up")

    with pytest.raises(NotUp, match="platemaker up"):
        record.read_settings()
    with pytest.raises(NotUp):
        record.take_down(1)


class Up:
    """`platemaker up --json` as a process; its lines are kept."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.environment = {**os.environ, "PLATEMAKER_DATA_DIR": str(folder)}
        self.output = folder.with_suffix(".jsonl")
        self.errors = folder.with_suffix(".txt")
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [PLATEMAKER, "up", "--json", *options], env=self.environment, stdout=output, stderr=errors
            )

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def last(self, name: str) -> dict[str, Any]:
        return [event for event in self.events() if event.get("name") == name][-1]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.errors.read_text() + self.output.read_text()
            assert self.process.poll() is None or condition(), self.errors.read_text()
            time.sleep(0.05)

    def wait_until_ready(self) -> None:
        self.wait_until(lambda: any(event["event"] == "ready" for event in self.events()))

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PLATEMAKER, *arguments], env=self.environment, capture_output=True, text=True, timeout=WAIT_S, check=False
        )


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[Callable[[], Up]]:
    started: list[Up] = []

    def start() -> Up:
        up = Up(tmp_path / "data", "--prefill", "0", "--decode", "0", "--no-flower")
        started.append(up)
        return up

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
        up.process.wait()


def test_the_stack_starts_again_what_dies_and_leaves_nothing_behind_however_it_ends(
    start_up: Callable[[], Up], tmp_path: Path
) -> None:
    up = start_up()
    up.wait_until_ready()
    record = Record(tmp_path / "data" / "up")
    assert [process.name for process in record.read()] == ["up", "valkey", "seaweedfs", "exporter"]
    settings = up.command("up", "--print-env")
    assert settings.returncode == 0 and "export PLATEMAKER_BROKER_URL=redis://" in settings.stdout
    assert "platemaker down" in up.command("up").stderr

    first = up.last("exporter")
    os.kill(first["pid"], signal.SIGKILL)
    up.wait_until(lambda: up.last("exporter")["state"] == "ready" and up.last("exporter")["restarts"] == 1)
    assert up.last("exporter")["pid"] != first["pid"]

    up.process.kill()
    up.process.wait()
    left = record.read()
    deadline = time.monotonic() + WAIT_S
    while any(process.is_alive for process in left):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)

    again = start_up()
    again.wait_until_ready()
    assert "The last `platemaker up` was killed; of its processes 0 still ran" in again.errors.read_text()
    processes = record.read()
    down = again.command("down")
    assert down.returncode == 0 and down.stdout == "Stopped 4 processes; the data is kept.\n"
    assert again.process.wait(timeout=WAIT_S) == 0
    assert not any(process.is_alive for process in processes)
    assert not record.settings_file.exists()
    secret = settings.stdout.split("redis://:")[1].split("@")[0]
    assert secret not in again.errors.read_text() + again.output.read_text() + up.errors.read_text()
