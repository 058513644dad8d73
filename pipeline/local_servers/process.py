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
    grace_s: ClassVar[float] = 15
    num_other_ports: ClassVar[int] = 0

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder.absolute()
        self.log = self.folder / f"{self.name}.log"
        self.port, *self._other_ports = _free_ports(1 + self.num_other_ports)
        self._account: Account | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LocalServerError(f"{self.name} is not running.")
        return self._process.pid

    def start(self) -> None:
        """Returns when the server answers. Raises: ServerDidNotStart."""
        self._process = self._spawn(self._command())
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while True:
                # First, lest another process that took the port answers in its place.
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise ServerDidNotStart(self.name, self.log)
                if _listens(self.port) and self._answers():
                    return
                time.sleep(0.03)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Nothing happens if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(self.stop_signal)
        try:
            process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
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
        # Few variables: SeaweedFS, for one, takes AWS_* and S3_* for its own configuration. The limit is for it
        # too: with 256 MiB it spends half its time collecting garbage.
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment | {"GOMEMLIMIT": "768MiB"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for us alone: workers stop first, servers last.
                start_new_session=True,
                user=account and account.uid,
                group=account and account.gid,
                extra_groups=account and [],
            )


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


def _free_ports(count: int) -> list[int]:
    candidates = random.sample(_PORTS, 100)
    free = [port for port in candidates if _can_bind(port) and _can_bind(port + TWIN)]
    if len(free) < count:
        raise LocalServerError("This machine has no free ports left.")
    return free[:count]


def _can_bind(port: int) -> bool:
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
