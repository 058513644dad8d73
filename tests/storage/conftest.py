import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pg8000.dbapi
import pytest
from pydantic import SecretStr

from pipeline.local_servers import Postgres
from storage.database import Database
from storage.settings import StorageSettings


class Server:
    """Makes databases on PostgreSQL and drops them, over one connection: logging in is slow."""

    def __init__(self, server: Postgres) -> None:
        self._url = server.url.rpartition("/")[0]
        self._connection = pg8000.dbapi.connect(server.user, "127.0.0.1", "postgres", server.port, server.password)
        self._connection.autocommit = True
        self._template: str | None = None
        # Waiting for the disk for each of these databases would take most of the time.
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            self.run(f"ALTER SYSTEM SET {setting} TO off")
        self.run("SELECT pg_reload_conf()")

    def run(self, statement: str) -> None:
        self._connection.cursor().execute(statement)

    def make(self, *, template: str = "template1") -> str:
        """A database far from UTC, as a server that somebody else runs may be."""
        name = f"test_{secrets.token_hex(8)}"
        self.run(f"CREATE DATABASE {name} TEMPLATE {template}")
        self.run(f"ALTER DATABASE {name} SET timezone TO 'Asia/Shanghai'")
        return name

    def open(self, name: str) -> Database:
        return Database(StorageSettings(database_url=SecretStr(f"{self._url}/{name}")))

    @property
    def template(self) -> str:
        """An upgraded database to copy: upgrading anew for every test takes longer."""
        if self._template is None:
            self._template = self.make()
            with closing(self.open(self._template)) as database:
                database.upgrade()
        return self._template

    def lend(self, template: str) -> Iterator[Database]:
        name = self.make(template=template)
        with closing(self.open(name)) as database:
            yield database
        # Refused while anything is still connected, so a test that leaves a connection open fails.
        self.run(f"DROP DATABASE {name}")

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="session")
def server(postgres_server: Postgres) -> Iterator[Server]:
    with closing(Server(postgres_server)) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database of this test alone, without tables."""
    if request.param == "sqlite":
        with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
            yield database
    else:
        yield from request.getfixturevalue("server").lend("template1")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database of this test alone, made by the migrations."""
    if request.param == "sqlite":
        with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
            database.upgrade()
            yield database
    else:
        server: Server = request.getfixturevalue("server")
        yield from server.lend(server.template)
