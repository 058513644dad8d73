"""Starting, asking and stopping one server process of this machine."""

import importlib.metadata
import os
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from pipeline.errors import LocalServerError, ServerDidNotStart, ServerNotInstalled
from pipeline.local_servers.orphans import tied_to_us

HOST = "127.0.0.1"
# SeaweedFS also opens port + 10000. Both ranges lie below the ports that Linux gives to outgoing connections.
TWIN = 10_000
_PORTS = range(12_000, 22_000)
_START_TIMEOUT_S = 60.0


class Account(NamedTuple):
    name: str
    uid: int
    gid: int


class LocalServer(ABC):
    """One server process. Only the process id started here is ever signalled."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    orphan_signal: ClassVar[signal.Signals] = signal.SIGKILL  # where `dies_with_us` is set and we are gone
    grace_s: ClassVar[float] = 15
    num_other_ports: ClassVar[int] = 0

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder.absolute()
        self.log = self.folder / f"{self.name}.log"
        self.port, *self._other_ports = free_ports(1 + self.num_other_ports)
        self.dies_with_us = False
        self._account: Account | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LocalServerError(f"{self.name} is not running.")
        return self._process.pid

    def start(self) -> None:
        """Returns when the server answers. Raises: ServerDidNotStart."""
        self.launch()
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not self.is_ready():
                if self.exit_code() is not None or time.monotonic() > deadline:
                    raise ServerDidNotStart(self.name, self.log)
                time.sleep(0.03)
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Returns at once."""
        self._process = self._spawn(self._command())

    def is_ready(self) -> bool:
        # Whether it runs first, lest another process that took the port answers in its place.
        return self._process is not None and self.exit_code() is None and _listens(self.port) and self._answers()

    def exit_code(self) -> int | None:
        """None: it runs, or was never launched. Below 0: the signal that ended it."""
        return None if self._process is None else self._process.poll()

    def ask_to_stop(self) -> None:
        """Returns at once; `stop` then waits."""
        if self._process is not None:
            self._process.send_signal(self.stop_signal)

    def stop(self) -> None:
        """Nothing happens if it does not run."""
        process = self._process
        if process is None:
            return
        self.ask_to_stop()
        try:
            process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def kill(self) -> None:
        """Nothing happens if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    @abstractmethod
    def _command(self) -> list[str | Path]: ...

    @abstractmethod
    def _answers(self) -> bool:
        """Whether a real request succeeds; the port is known to be open."""

    def _spawn(self, command: list[str | Path]) -> subprocess.Popen[bytes]:
        account = self._account
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self._working_folder(),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for us alone: workers stop first, servers last.
                start_new_session=True,
                user=account and account.uid,
                group=account and account.gid,
                extra_groups=account and [],
                preexec_fn=tied_to_us(self.orphan_signal) if self.dies_with_us else None,
            )

    def _working_folder(self) -> Path:
        return self.folder

    def _environment(self) -> dict[str, str]:
        # Few variables: SeaweedFS, for one, takes AWS_* and S3_* for its own configuration. The limit is for it
        # too: with 256 MiB it spends half its time collecting garbage.
        ours = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        return ours | {"GOMEMLIMIT": "768MiB"}


_Server = TypeVar("_Server", bound=LocalServer)


@contextmanager
def running(server: _Server) -> Iterator[_Server]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


def packaged(package: str, program: str) -> Path:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as exc:
        raise ServerNotInstalled(package) from exc
    for file in distribution.files or ():
        if file.name == program:
            return Path(str(distribution.locate_file(file))).resolve()
    raise ServerNotInstalled(package)


def write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def free_ports(count: int) -> list[int]:
    candidates = random.sample(_PORTS, 100)
    free = [port for port in candidates if can_bind(port) and can_bind(port + TWIN)]
    if len(free) < count:
        raise LocalServerError("This machine has no free ports left.")
    return free[:count]


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
