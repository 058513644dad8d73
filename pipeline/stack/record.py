"""What a running `up` leaves on disk: who it is, what it started, and the settings for other terminals."""

import fcntl
import json
import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from pipeline.errors import AlreadyUp, NotUp
from pipeline.local_servers.process import write_private

KILL_AFTER_S = 10.0


class RunningProcess(NamedTuple):
    """A process id can be given again, so the time it was started belongs to it (seconds since 1970)."""

    name: str
    pid: int
    created: float

    @classmethod
    def of(cls, name: str, pid: int) -> Self | None:
        with suppress(psutil.NoSuchProcess):
            return cls(name, pid, psutil.Process(pid).create_time())
        return None

    @property
    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.created) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True)
class Record:
    """The folder of the stack: `up.json` and `settings.env`, which hold its processes and its secrets."""

    folder: Path

    @property
    def settings_file(self) -> Path:
        return self.folder / "settings.env"

    @contextmanager
    def held(self) -> Iterator[None]:
        """For one `up` at a time; the kernel lets go of it however that ends.

        Raises:
            AlreadyUp: another one holds it.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.geteuid() == 0:
            self.folder.chmod(0o711)  # PostgreSQL then runs as another user; what lies here is closed itself
        with (self.folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyUp(self._up_pid()) from None
            yield

    def write(self, processes: Sequence[RunningProcess]) -> None:
        """Of the whole stack, `up` itself first."""
        fresh = self.folder / "up.json.new"
        fresh.write_text(json.dumps([process._asdict() for process in processes], indent=1))
        fresh.replace(self.folder / "up.json")

    def read(self) -> list[RunningProcess]:
        try:
            return [RunningProcess(**process) for process in json.loads((self.folder / "up.json").read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def clear(self) -> None:
        for name in ("up.json", "settings.env"):
            (self.folder / name).unlink(missing_ok=True)

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """For the shell, readable by its owner alone."""
        self.settings_file.unlink(missing_ok=True)
        lines = (f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
        write_private(self.settings_file, "".join(lines))

    def read_settings(self) -> str:
        """
        Raises:
            NotUp: nothing runs.
        """
        if not self.settings_file.is_file() or not any(process.is_alive for process in self.read()[:1]):
            raise NotUp
        return self.settings_file.read_text()

    def end_leftovers(self) -> int | None:
        """Ends what an `up` that was killed has left running; returns how many that were. None: it was not killed."""
        if not self.read():
            return None
        left = [process for process in self.read() if process.is_alive]
        _end(left)
        return len(left)

    def take_down(self, patience_s: float) -> int:
        """Asks the running `up` to stop and waits for it; ends what is left after that. Returns how many ran.

        Raises:
            NotUp: nothing runs.
        """
        running = [process for process in self.read() if process.is_alive]
        if not running:
            self.clear()
            raise NotUp
        if running[0] == self.read()[0]:
            running[0].send(signal.SIGTERM)
            _wait(running[:1], patience_s)
        _end([process for process in self.read() if process.is_alive])
        self.clear()
        return len(running)

    def _up_pid(self) -> int:
        return next((process.pid for process in self.read()), 0)


def _end(processes: Sequence[RunningProcess]) -> None:
    for process in processes:
        process.send(signal.SIGTERM)
    for process in _wait(processes, KILL_AFTER_S):
        process.send(signal.SIGKILL)


def _wait(processes: Sequence[RunningProcess], patience_s: float) -> list[RunningProcess]:
    """Those that still live then."""
    deadline = time.monotonic() + patience_s
    left = [process for process in processes if process.is_alive]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [process for process in left if process.is_alive]
    return left
