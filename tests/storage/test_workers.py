from dataclasses import replace
from datetime import timedelta

from storage.database import Database, utc_now
from storage.workers import (
    FORGET_WORKERS,
    KEEP_PINGS,
    WorkerInfo,
    add_ping,
    answer_ping,
    answered_pings,
    clock_ahead_s,
    live_workers,
    other_engine,
    register,
    unregister,
)
from tests.storage.made_rows import NOW, later

FIRST = WorkerInfo(
    worker="host:1",
    pool="decode",
    queues=("decode.batch",),
    version="1",
    model="tiny",
    engine_sha256="a" * 64,
    started_at=NOW,
)
SECOND = replace(FIRST, worker="host:2", pool="prefill", queues=("prefill.batch",), started_at=later(1))


def names(database: Database, seen_after: float) -> list[str]:
    with database.reading() as session:
        return [row.worker for row in live_workers(session, seen_after=later(seen_after))]


def beat(database: Database, *workers: WorkerInfo, at: float = 0) -> None:
    for worker in workers:
        with database.writing() as session:
            register(session, worker, now=later(at))


def test_a_worker_counts_as_alive_as_long_as_it_says_so(database: Database) -> None:
    beat(database, FIRST, SECOND)
    beat(database, FIRST, at=60)

    assert names(database, 0) == ["host:1", "host:2"]
    assert names(database, 30) == ["host:1"]
    with database.writing() as session:
        unregister(session, "host:1")
    assert names(database, 0) == ["host:2"]


def test_silent_workers_are_forgotten_after_a_day(database: Database) -> None:
    beat(database, FIRST)
    beat(database, SECOND, at=FORGET_WORKERS.total_seconds() + 1)

    assert names(database, -1) == ["host:2"]


def test_of_two_workers_that_differ_the_later_one_is_told_and_only_it(database: Database) -> None:
    other = replace(SECOND, engine_sha256="b" * 64)
    beat(database, FIRST, other)

    with database.reading() as session:
        told = other_engine(session, other, seen_after=NOW)
        assert told is not None and told.worker == "host:1"
        assert other_engine(session, FIRST, seen_after=NOW) is None
        assert other_engine(session, SECOND, seen_after=NOW) is None  # computes the same
        assert other_engine(session, other, seen_after=later(1)) is None  # the first one is gone


def test_of_two_that_started_in_the_same_moment_one_gives_way(database: Database) -> None:
    other = replace(FIRST, worker="host:2", engine_sha256="b" * 64)
    beat(database, FIRST, other)

    with database.reading() as session:
        told = [other_engine(session, info, seen_after=NOW) for info in (FIRST, other)]
    assert [row is None for row in told] == [True, False]


def test_the_clock_of_a_server_on_this_machine_is_this_machines(database: Database) -> None:
    with database.reading() as session:
        before = utc_now()
        ahead_s = clock_ahead_s(session)
        took_s = (utc_now() - before).total_seconds()

    assert abs(ahead_s) <= took_s


def test_a_ping_is_answered_once(database: Database) -> None:
    with database.writing() as session:
        first, second = (add_ping(session, "decode.batch", now=NOW) for _ in range(2))
    for worker in ("host:1", "host:2"):
        with database.writing() as session:
            answer_ping(session, first, worker=worker, now=later(1))

    with database.reading() as session:
        found = answered_pings(session, [first, second])
    assert {ping: row.worker for ping, row in found.items()} == {first: "host:1"}
    assert found[first].answered_at == later(1)


def test_old_pings_are_forgotten(database: Database) -> None:
    with database.writing() as session:
        old = add_ping(session, "decode.batch", now=NOW)
        add_ping(session, "decode.batch", now=NOW + KEEP_PINGS + timedelta(seconds=1))
    with database.writing() as session:
        answer_ping(session, old, worker="host:1", now=NOW)
        assert answered_pings(session, [old]) == {}
