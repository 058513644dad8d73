"""The migrations make what the models say, on both databases."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from pydantic import SecretStr
from sqlalchemy import inspect, select, text, update
from sqlalchemy.orm import Session

import migrations
from pipeline.local_servers import Postgres
from storage.database import Database
from storage.errors import DatabaseUnavailable, SchemaError
from storage.schema import SCHEMA_HEAD, Base, JobRow, SnapshotRow
from storage.settings import StorageSettings
from tests.storage.conftest import Server
from tests.storage.made_rows import race, submit


def table_names(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return set(inspect(connection).get_table_names())


def test_the_migrations_make_exactly_the_models(empty_database: Database) -> None:
    empty_database.upgrade()

    with empty_database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    assert table_names(empty_database) == {*Base.metadata.tables, "alembic_version"}


def test_every_constraint_has_the_name_that_a_later_migration_will_look_for(empty_database: Database) -> None:
    empty_database.upgrade()

    with empty_database.engine.connect() as connection:
        inspector = inspect(connection)
        for name, table in Base.metadata.tables.items():
            found = {
                inspector.get_pk_constraint(name)["name"],
                *(key["name"] for key in inspector.get_foreign_keys(name)),
                *(key["name"] for key in inspector.get_unique_constraints(name)),
            }
            assert found == {constraint.name for constraint in table.constraints}


def test_foreign_keys_delete_what_the_models_say(empty_database: Database) -> None:
    empty_database.upgrade()

    with empty_database.engine.connect() as connection:
        inspector = inspect(connection)
        for name, table in Base.metadata.tables.items():
            found = {key["name"]: key["options"].get("ondelete") for key in inspector.get_foreign_keys(name)}
            assert found == {key.name: key.ondelete for key in table.foreign_key_constraints}


def test_going_back_to_base_leaves_no_table(empty_database: Database) -> None:
    empty_database.upgrade()
    submit(empty_database)

    empty_database.upgrade("base")

    assert table_names(empty_database) == {"alembic_version"}
    with pytest.raises(SchemaError):
        empty_database.check_schema()


def test_going_back_and_forth_makes_the_models_again(empty_database: Database) -> None:
    empty_database.upgrade()
    empty_database.upgrade("base")

    empty_database.upgrade()

    empty_database.check_schema()
    assert table_names(empty_database) == {*Base.metadata.tables, "alembic_version"}


def test_upgrading_again_keeps_every_row(empty_database: Database) -> None:
    empty_database.upgrade()
    job_id = submit(empty_database)

    empty_database.upgrade()

    empty_database.check_schema()
    with empty_database.reading() as session:
        assert session.scalars(select(JobRow.job_id)).all() == [job_id]


def test_snapshots_of_the_first_version_live_on_without_a_pin(empty_database: Database) -> None:
    empty_database.upgrade("0001")
    columns = "tenant, document_id, fingerprint, fields, state, fence, attempts, num_tokens, done_tokens"
    with empty_database.writing() as session:
        session.execute(
            text(
                f"INSERT INTO snapshots ({columns}, computed_tokens, size_bytes, created_at, ready_at) VALUES"
                " ('acme', 'd', 'f', '{}', 'ready', 1, 0, 8, 8, 8, 200, '2026-11-03 21:00:00.000000',"
                " '2026-11-03 21:00:00.000000')"
            )
        )

    empty_database.upgrade()

    with empty_database.reading() as session:
        row = session.scalars(select(SnapshotRow)).one()
    assert (row.state, row.pinned, row.expires_at, row.claimed_at) == ("ready", False, None, None)


def test_upgrades_that_race_make_one_schema(empty_database: Database) -> None:
    url = empty_database.engine.url.render_as_string(hide_password=False).replace("+pg8000", "")
    script = """
import sys
import alembic.command
from storage.database import Database
from storage.settings import StorageSettings
database = Database(StorageSettings())
print("ready", flush=True)
sys.stdin.readline()
database.upgrade()
database.close()
"""
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PLATEMAKER_DATABASE_URL": url}
    racers = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        codes = [racer.wait(60) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()

    assert codes == [0, 0]
    empty_database.check_schema()
    assert table_names(empty_database) == {*Base.metadata.tables, "alembic_version"}


def test_the_code_expects_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))

    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA_HEAD]


def test_an_upgraded_database_passes_the_check(database: Database) -> None:
    database.check_schema()


def test_an_empty_database_is_told_from_an_absent_one(empty_database: Database) -> None:
    with pytest.raises(SchemaError, match="platemaker db upgrade"):
        empty_database.check_schema()


@pytest.mark.parametrize(
    "statement", ["UPDATE alembic_version SET version_num = '9999'", "DELETE FROM alembic_version"]
)
def test_another_version_is_refused(database: Database, statement: str) -> None:
    with database.writing() as session:
        session.execute(text(statement))

    with pytest.raises(SchemaError, match="platemaker db upgrade"):
        database.check_schema()


def test_a_query_without_tables_says_what_to_do(empty_database: Database) -> None:
    with pytest.raises(SchemaError, match="platemaker db upgrade"), empty_database.reading() as session:
        session.scalars(select(JobRow)).all()


def test_a_query_for_a_column_that_is_not_there_says_what_to_do(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("ALTER TABLE jobs DROP COLUMN title"))

    with pytest.raises(SchemaError, match="platemaker db upgrade"), database.writing() as session:
        session.execute(update(JobRow).values(title="new"))


def read_one(database: Database) -> None:
    with database.reading() as session:
        session.execute(text("SELECT 1"))


def write_one(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("SELECT 1"))


def test_a_server_that_does_not_listen_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"postgresql://user:secret@127.0.0.1:{unused.getsockname()[1]}/platemaker"
        with closing(Database(StorageSettings(database_url=SecretStr(url), patience_s=0))) as database:
            calls: list[Callable[[Database], None]] = [
                Database.check_schema,
                Database.upgrade,
                read_one,
                write_one,
            ]
            for call in calls:
                with pytest.raises(DatabaseUnavailable, match="PLATEMAKER_DATABASE_URL") as caught:
                    call(database)
                assert "secret" not in str(caught.value)


@pytest.mark.parametrize("change", ["name", "password"])
def test_a_server_that_refuses_the_url_is_unavailable(postgres_server: Postgres, change: str) -> None:
    url = {
        "name": f"{postgres_server.url}_not_there",
        "password": postgres_server.url.replace(postgres_server.password, "wrong"),
    }[change]
    with closing(Database(StorageSettings(database_url=SecretStr(url)))) as database:
        for call in (Database.check_schema, Database.upgrade, read_one, write_one):
            with pytest.raises(DatabaseUnavailable, match="PLATEMAKER_DATABASE_URL"):
                call(database)


def test_a_file_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/no/such/folder/platemaker.db"
    with closing(Database(StorageSettings(database_url=SecretStr(url)))) as database:
        for call in (Database.check_schema, Database.upgrade, read_one, write_one):
            with pytest.raises(DatabaseUnavailable, match="PLATEMAKER_DATABASE_URL"):
                call(database)


def test_transactions_that_block_each_other_are_run_again(server: Server) -> None:
    tries: list[int] = []
    both_hold_one = threading.Barrier(2)

    def lock_both(number: int) -> bool:
        def work(session: Session) -> bool:
            tries.append(number)
            session.execute(text(f"SELECT pg_advisory_xact_lock({number})"))
            if len(tries) <= 2:
                both_hold_one.wait(10)
            session.execute(text(f"SELECT pg_advisory_xact_lock({1 - number})"))
            return True

        return database.retrying(work)

    with closing(server.open("postgres")) as database:
        assert race(lock_both, 2) == [True, True]
    assert len(tries) == 3
