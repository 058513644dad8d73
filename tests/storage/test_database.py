"""A database that is away or locked for a while goes unnoticed; one that needs a person says so at once."""

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import storage.database
from storage import patience
from storage.database import Database
from storage.errors import DatabaseRefused, DatabaseUnavailable
from storage.settings import StorageSettings
from tests.storage.conftest import Server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.01)


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Database, sqlite3.Connection]]:
    """A file of ours that another program has locked, and that program's connection."""
    monkeypatch.setattr(storage.database, "BUSY_TIMEOUT_S", 0)
    with closing(Database(StorageSettings(data_dir=tmp_path))) as database:
        database.upgrade()
        other = sqlite3.connect(tmp_path / "platemaker.db", isolation_level=None, check_same_thread=False)
        with closing(other):
            other.execute("BEGIN IMMEDIATE")
            yield database, other


def test_a_database_that_is_locked_for_a_while_goes_unnoticed(
    locked: tuple[Database, sqlite3.Connection], caplog: pytest.LogCaptureFixture
) -> None:
    database, other = locked
    release = threading.Timer(0.1, other.rollback)
    release.start()

    with caplog.at_level(logging.WARNING), database.writing() as session:
        session.execute(text("CREATE TABLE mine (n INTEGER)"))

    release.join()
    assert [record.getMessage().endswith("Asking again for up to 60 s.") for record in caplog.records] == [True]


def test_patience_with_a_locked_database_has_an_end(tmp_path: Path, locked: tuple[Database, Any]) -> None:
    with closing(Database(StorageSettings(data_dir=tmp_path, patience_s=0.05))) as database:
        with pytest.raises(DatabaseUnavailable) as caught, database.writing() as session:
            session.execute(text("CREATE TABLE mine (n INTEGER)"))
        assert caught.value.retryable


def test_a_write_that_is_cut_off_is_done_once(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("CREATE TABLE counted (n INTEGER)"))
    tries = []

    def work(session: Session) -> None:
        session.execute(text("INSERT INTO counted VALUES (1)"))
        tries.append(1)
        if len(tries) < 3:
            raise OperationalError("INSERT", {}, Exception("the connection was lost"))

    database.retrying(work)

    with database.reading() as session:
        assert session.scalar(text("SELECT count(*) FROM counted")) == 1


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    with closing(Database(StorageSettings(data_dir=tmp_path))) as database:
        database.upgrade()
        tries = []

        def fill(session: Session) -> None:
            tries.append(1)
            session.execute(text("PRAGMA max_page_count = 1"))  # SQLite then takes no page more
            session.execute(text("CREATE TABLE big (b BLOB)"))
            session.execute(text("INSERT INTO big VALUES (zeroblob(1000000))"))

        with pytest.raises(DatabaseRefused, match="Free space, or set PLATEMAKER_DATABASE_URL"):
            database.retrying(fill)

        assert len(tries) == 1
        database.check_schema()


def test_a_file_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    with closing(Database(StorageSettings(data_dir=tmp_path))) as database:
        database.upgrade()
    url = f"sqlite:///file:{tmp_path}/platemaker.db?mode=ro&uri=true"

    with (
        closing(Database(StorageSettings(database_url=SecretStr(url)))) as database,
        pytest.raises(DatabaseRefused, match="right to write"),
        database.writing() as session,
    ):
        session.execute(text("DELETE FROM jobs"))


def test_a_data_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DatabaseRefused, match="PLATEMAKER_DATA_DIR"):
        Database(StorageSettings(data_dir=tmp_path / "file" / "data"))


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    (tmp_path / "platemaker.db").write_bytes(b"not a database at all" * 1000)

    with (
        closing(Database(StorageSettings(data_dir=tmp_path))) as database,
        pytest.raises(DatabaseRefused, match="no SQLite database"),
    ):
        database.check_schema()


def test_who_freezes_inside_a_transaction_holds_its_locks_for_a_while_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.database, "IDLE_TIMEOUT_S", 0.5)
    name = server.make()
    with closing(server.open(name)) as frozen, closing(server.open(name)) as other:
        with other.writing() as session:
            session.execute(text("CREATE TABLE mine (n INTEGER)"))
            session.execute(text("INSERT INTO mine VALUES (0)"))

        with pytest.raises(DatabaseUnavailable) as caught, frozen.writing() as held:
            held.execute(text("UPDATE mine SET n = 1"))
            with other.writing() as session:  # waits for the lock, and gets it
                session.execute(text("UPDATE mine SET n = 2"))
            held.execute(text("UPDATE mine SET n = 3"))

        assert caught.value.retryable
        with other.reading() as session:
            assert session.execute(text("SELECT n FROM mine")).scalars().all() == [2]
            time.sleep(1)  # longer than a writer may
            assert session.execute(text("SELECT n FROM mine")).scalars().all() == [2]
    server.run(f"DROP DATABASE {name}")
