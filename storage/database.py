"""One database: its connections, transactions, schema version and migrations."""

import logging
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from sqlalchemy import Connection, Dialect, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from storage.errors import DatabaseRefused, DatabaseUnavailable, SchemaError, StorageError
from storage.patience import Patience
from storage.schema import SCHEMA_HEAD
from storage.settings import StorageSettings
from storage.tls import database_address

BUSY_TIMEOUT_S = 30
ANSWER_TIMEOUT_S = 60  # for connecting and for each statement; a migration of large tables needs some time
# A process that freezes, or whose machine loses its power, inside a transaction: PostgreSQL ends that after so long, or
# everybody would wait for its locks. Less than the shortest sensible lease.
IDLE_TIMEOUT_S = 10
# A connection that a server cut off cannot be closed politely; SQLAlchemy tells that with a traceback each.
logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
UPGRADE_LOCK = 0x706C6174  # any number that nobody else locks in this database
SCHEMA_CODES = ("42P01", "42703")  # no such table, no such column
# Refused or lost connections, conflicts with another transaction, out of resources, shutting down
# and 25P03: this process said nothing for too long inside a transaction
PASSING_CODES = ("08", "25P03", "40", "53", "57P")
LOGIN_CODES = ("28", "3D")  # wrong user or password, no such database
FULL = (
    "The disk of the database is full or broken. Free space, or set PLATEMAKER_DATABASE_URL or PLATEMAKER_DATA_DIR to "
    "another."
)
NO_FILE = (
    "The file of the database cannot be opened or written. Give this user the right to write it and its folder, or set "
    "PLATEMAKER_DATABASE_URL or PLATEMAKER_DATA_DIR to another."
)
NOT_OURS = "The file in PLATEMAKER_DATABASE_URL or PLATEMAKER_DATA_DIR is damaged or no SQLite database. Name another."
NOT_TRUSTED = (
    "The certificate of the database cannot be trusted. Set PLATEMAKER_TLS_CA_FILE to its authority's, and name the "
    "host in PLATEMAKER_DATABASE_URL as the certificate does."
)
# By what SQLite says
REFUSALS = {
    "database or disk is full": FULL,
    "disk I/O error": FULL,
    "attempt to write a readonly database": NO_FILE,
    "unable to open database file": NO_FILE,
    "file is not a database": NOT_OURS,
    "database disk image is malformed": NOT_OURS,
}
FULL_CODE = "53100"
Result = TypeVar("Result")


def utc_now() -> datetime:
    return datetime.now(UTC)


class Database:
    """Short transactions on SQLite or PostgreSQL. No session stays open while a model works.

    A transaction waits for a database that does not answer when it begins; what breaks later is its caller's.
    Once `stopping` is set, nothing is waited for.
    """

    def __init__(self, settings: StorageSettings, *, stopping: threading.Event | None = None) -> None:
        self.settings = settings
        self.description = settings.safe_database_url()
        self._patience = Patience(settings.patience_s, stopping=stopping)
        url = settings.resolved_database_url()
        if url.startswith("sqlite"):
            try:
                settings.data_dir.mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise DatabaseRefused(NO_FILE) from exc
        self.engine = _sqlite_engine(url) if url.startswith("sqlite") else _server_engine(url, settings.tls_ca_file)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session for reading only."""
        with self._session(read_only=True) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session whose changes are committed together at the end, or not at all."""
        with self._session(read_only=False) as session:
            yield session
            session.commit()

    def retrying(self, work: Callable[[Session], Result], *, attempts: int = 5) -> Result:
        """Runs a write that may be repeated whole, again after a lost connection or a serialisation conflict."""
        for attempt in range(attempts):
            try:
                with self.writing() as session:
                    return work(session)
            except DatabaseUnavailable as exc:
                if not exc.retryable or attempt == attempts - 1:
                    raise
                time.sleep(0.1 * 2**attempt)
        raise AssertionError("unreachable")

    @contextmanager
    def _session(self, *, read_only: bool) -> Iterator[Session]:
        engine = self.engine.execution_options(platemaker_read_only=read_only)
        try:
            with Session(engine, expire_on_commit=False) as session:
                self._patience.call(lambda: _begin(session, read_only=read_only))
                yield session
        except DBAPIError as exc:
            _raise_translated(exc)

    def check_schema(self) -> None:
        """
        Raises:
            SchemaError: the tables are missing or of another version.
            DatabaseUnavailable: nothing answers.
        """
        try:
            with self.engine.connect() as connection:
                if not inspect(connection).has_table("alembic_version"):
                    raise SchemaError
                found = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
        except DBAPIError as exc:
            raise (_translation(exc) or DatabaseUnavailable()) from exc
        except SQLAlchemyError as exc:
            raise DatabaseUnavailable from exc
        if found != [SCHEMA_HEAD]:
            raise SchemaError

    def upgrade(self, revision: str = "head") -> None:
        """Brings the schema to this version; does nothing where it is there already."""
        try:
            with self.engine.connect() as connection:
                if connection.dialect.name == "postgresql":  # SQLite's transactions exclude each other anyway
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": UPGRADE_LOCK})
                _run_migrations(connection, revision)
                connection.commit()
        except DBAPIError as exc:
            _raise_translated(exc)

    def close(self) -> None:
        self.engine.dispose()


def _begin(session: Session, *, read_only: bool) -> None:
    try:
        connection = session.connection()
        if read_only and connection.dialect.name == "postgresql":  # holds no lock, and a report may take its time
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
    except DBAPIError as exc:
        session.rollback()
        _raise_translated(exc)


def _run_migrations(connection: Connection, revision: str) -> None:
    # Imported here: alembic costs 0.3 s, and only an upgrade needs it.
    from alembic import command
    from alembic.config import Config

    import migrations

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    if revision == "base":
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


def _raise_translated(exc: DBAPIError) -> NoReturn:
    found = _translation(exc)
    if found is None:
        raise exc
    raise found from exc


def _translation(exc: DBAPIError) -> StorageError | None:
    message, code = str(exc.orig), _sqlstate(exc)
    if "no such table" in message or "no such column" in message or code in SCHEMA_CODES:
        return SchemaError()
    refusal = next((sentence for said, sentence in REFUSALS.items() if said in message), None)
    if refusal or code == FULL_CODE:
        return DatabaseRefused(refusal or FULL)
    if code.startswith(LOGIN_CODES):
        return DatabaseRefused()
    if (
        isinstance(exc, (OperationalError, InterfaceError))
        or exc.connection_invalidated
        or code.startswith(PASSING_CODES)
    ):
        return DatabaseUnavailable()
    return None


def _sqlstate(exc: DBAPIError) -> str:
    """PostgreSQL's code: pg8000 raises whatever the server says as a ProgrammingError, even a wrong password."""
    details = exc.orig.args[0] if exc.orig is not None and exc.orig.args else None
    return str(details.get("C", "")) if isinstance(details, dict) else ""


def _server_engine(url: str, ca_file: Path | None) -> Engine:
    address = database_address(url, ca_file)
    encryption = {} if address.encryption is None else {"ssl_context": address.encryption}
    # Parameters are hidden because errors are logged, and they hold questions and answers.
    engine = create_engine(
        address.url,
        pool_pre_ping=True,
        pool_size=5,
        max_overflow=10,
        connect_args={"timeout": ANSWER_TIMEOUT_S, **encryption},
        hide_parameters=True,
    )

    @event.listens_for(engine, "do_connect")
    def _connect(dialect: Dialect, _record: Any, arguments: Any, options: Any) -> Any:
        try:
            return dialect.connect(*arguments, **options)
        except ssl.SSLCertVerificationError as exc:  # the driver translates none of these
            raise DatabaseRefused(NOT_TRUSTED) from exc
        except OSError as exc:
            raise DatabaseUnavailable from exc

    @event.listens_for(engine, "connect")
    def _limit_idling(connection: Any, _record: Any) -> None:
        connection.cursor().execute(f"SET idle_in_transaction_session_timeout = {IDLE_TIMEOUT_S * 1000:.0f}")
        connection.commit()

    return engine


def _use_wal(connection: Any) -> None:
    """Turns on write-ahead logging, once for each file. Unlike other statements, this one does not wait for a lock."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _sqlite_engine(url: str) -> Engine:
    engine = create_engine(
        url, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}, hide_parameters=True
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin where `_begin` says, not where sqlite3 guesses
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A deferred transaction that reads and then writes fails at once when another has written meanwhile.
        read_only = connection.get_execution_options().get("platemaker_read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine
