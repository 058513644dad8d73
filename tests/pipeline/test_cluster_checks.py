"""What `platemaker doctor --cluster` says of a cluster that is not well."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import update

from pipeline import cluster_checks
from pipeline.local_servers import Valkey
from storage.database import Database, utc_now
from storage.schema import WorkerRow
from storage.settings import StorageSettings
from storage.workers import WorkerInfo, register
from tasks.app import app, configure
from tasks.queues import ALL_QUEUES
from tasks.settings import TaskSettings

DECODE_QUEUE = "decode.batch"

SILENT = WorkerInfo(
    worker="host:1",
    pool="decode",
    queues=(DECODE_QUEUE,),
    version=version("platemaker"),
    model="tiny",
    engine_sha256="a" * 64,
    started_at=utc_now(),
)


@pytest.fixture
def storage(tmp_path: Path) -> StorageSettings:
    settings = StorageSettings(data_dir=tmp_path)
    with closing(Database(settings)) as database:
        database.upgrade()
    return settings


@pytest.fixture
def task(valkey_server: Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskSettings]:
    """A broker on which nobody answers, and little patience with it."""
    monkeypatch.setattr(cluster_checks, "ANSWER_S", 0.1)
    monkeypatch.setattr(cluster_checks, "INSPECT_S", 0.1)
    yield TaskSettings(broker_url=SecretStr(f"{valkey_server.url.rpartition('/')[0]}/14"))
    with app.connection_for_write() as connection:
        for queue in ALL_QUEUES:
            connection.default_channel.queue_purge(queue)
    configure(TaskSettings())


def told(storage: StorageSettings, task: TaskSettings) -> dict[str, tuple[bool, str]]:
    return {check.name: (check.ok, check.detail) for check in cluster_checks.cluster_checks(storage, task)}


def add(storage: StorageSettings, *workers: WorkerInfo) -> None:
    with closing(Database(storage)) as database, database.writing() as session:
        for worker in workers:
            register(session, worker, now=utc_now())


def test_a_queue_without_a_worker_says_which_one_to_start(storage: StorageSettings, task: TaskSettings) -> None:
    found = told(storage, task)

    assert found[DECODE_QUEUE] == (False, "no worker takes it. Start one: platemaker worker decode")
    assert found["workers"] == (False, "none said that it is alive")


def test_a_worker_that_says_it_is_alive_but_takes_nothing_is_told(storage: StorageSettings, task: TaskSettings) -> None:
    add(storage, SILENT)

    found = told(storage, task)

    assert found["workers"] == (True, "1 decode")
    is_ok, detail = found[DECODE_QUEUE]
    assert not is_ok and "none takes messages" in detail


def test_workers_that_differ_are_named(storage: StorageSettings, task: TaskSettings) -> None:
    add(storage, SILENT, replace(SILENT, worker="host:2", version="2001.1.0", engine_sha256="b" * 64))
    with closing(Database(storage)) as database, database.writing() as session:
        session.execute(update(WorkerRow).where(WorkerRow.worker == "host:2").values(clock_ahead_s=-4.2))

    found = told(storage, task)

    assert not found["clocks"][0] and "host:2 by -4.2 s" in found["clocks"][1] and "host:1" not in found["clocks"][1]
    assert not found["versions"][0] and "2001.1.0 at host:2" in found["versions"][1]
    assert not found["models"][0] and "tiny (bbbbbbbb) at host:2" in found["models"][1]


def test_a_broker_that_is_away_is_the_one_thing_said(storage: StorageSettings) -> None:
    found = told(storage, TaskSettings(broker_url=SecretStr("redis://127.0.0.1:9/0")))

    configure(TaskSettings())
    assert [*found] == ["cluster"] and found["cluster"][1].startswith("The broker does not answer")
