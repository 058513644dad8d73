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


def run_on_server(server: Postgres, statement: str) -> None:
    with closing(
        pg8000.dbapi.connect(server.user, "127.0.0.1", "postgres", server.port, server.password)
    ) as connection:
        connection.autocommit = True
        connection.cursor().execute(statement)


def make_database(server: Postgres, *, template: str = "template1") -> str:
    """A database far from UTC, as a server that somebody else runs may be."""
    name = f"test_{secrets.token_hex(8)}"
    run_on_server(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    run_on_server(server, f"ALTER DATABASE {name} SET timezone TO 'Asia/Shanghai'")
    return name


def open_on_server(server: Postgres, name: str) -> Database:
    return Database(StorageSettings(database_url=SecretStr(f"{server.url.rpartition('/')[0]}/{name}")))


@pytest.fixture(scope="session")
def migrated_template(postgres_server: Postgres) -> str:
    """The name of an upgraded PostgreSQL database to copy: upgrading anew for every test takes longer."""
    name = make_database(postgres_server)
    with closing(open_on_server(postgres_server, name)) as database:
        database.upgrade()
    # Databases come and go here; waiting for the disk each time would be most of the time.
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        run_on_server(postgres_server, f"ALTER SYSTEM SET {setting} TO off")
    run_on_server(postgres_server, "SELECT pg_reload_conf()")
    return name


@pytest.fixture(params=["sqlite", "postgres"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database of this test alone, without tables."""
    if request.param == "sqlite":
        with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
            yield database
    else:
        yield from _on_postgres(request.getfixturevalue("postgres_server"), "template1")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database of this test alone, made by the migrations."""
    if request.param == "sqlite":
        with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
            database.upgrade()
            yield database
    else:
        yield from _on_postgres(
            request.getfixturevalue("postgres_server"), request.getfixturevalue("migrated_template")
        )


def _on_postgres(server: Postgres, template: str) -> Iterator[Database]:
    name = make_database(server, template=template)
    with closing(open_on_server(server, name)) as database:
        yield database
    # Refused while anything is still connected, so a test that leaves a connection open fails.
    run_on_server(server, f"DROP DATABASE {name}")
