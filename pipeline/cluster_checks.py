"""`platemaker doctor --cluster`: a message through every queue and back, and whether the workers agree."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.metadata import version

from celery import Celery
from kombu.exceptions import OperationalError

from pipeline.doctor import Check
from storage.database import Database, utc_now
from storage.errors import StorageError
from storage.schema import PingRow, WorkerRow
from storage.settings import StorageSettings
from storage.workers import add_ping, answered_pings, clock_ahead_s, live_workers
from tasks.app import configure
from tasks.errors import BrokerUnavailable, TaskError
from tasks.queue_depth import queue_depths
from tasks.queues import ALL_QUEUES
from tasks.registry import alive_since
from tasks.settings import TaskSettings

ANSWER_S = 10.0
CLOCK_S = 1.0
INSPECT_S = 2.0
POLL_S = 0.1


def cluster_checks(storage: StorageSettings, task: TaskSettings) -> Iterator[Check]:
    """Each check as it is done; the first is whether the others can be."""
    began = time.perf_counter()
    database = Database(storage.model_copy(update={"patience_s": 0.0}))
    try:
        database.check_schema()
        app = configure(task)
        queue_depths(app)
        yield from _checks(database, app, task)
    except (StorageError, TaskError) as exc:
        yield Check("cluster", False, str(exc), time.perf_counter() - began)
    finally:
        database.close()


def _checks(database: Database, app: Celery, task: TaskSettings) -> Iterator[Check]:
    with database.reading() as session:
        workers = live_workers(session, seen_after=alive_since(utc_now(), task.lease_s))
        own_clock_s = clock_ahead_s(session)
    by_name = {row.worker: row for row in workers}
    pings = _send_pings(database, app)
    began = time.monotonic()
    answers: dict[str, PingRow] = {}
    for queue, ping_id in pings.items():
        while ping_id not in answers and time.monotonic() - began < ANSWER_S:
            with database.reading() as session:
                answers = answered_pings(session, list(pings.values()))
            if ping_id not in answers:
                time.sleep(POLL_S)
        yield _queue_check(queue, answers.get(ping_id), workers, app, time.monotonic() - began)
    began = time.monotonic()
    comparisons: tuple[tuple[str, Callable[[], tuple[bool, str]]], ...] = (
        ("workers", lambda: _alive(workers)),
        ("clocks", lambda: _clocks([*by_name.values()], own_clock_s)),
        ("versions", lambda: _agree(workers, lambda row: row.version, "version", own=version("platemaker"))),
        ("models", lambda: _agree(workers, lambda row: f"{row.model} ({row.engine_sha256[:8]})", "model")),
    )
    for name, find in comparisons:
        wrong, detail = find()
        yield Check(name, not wrong, detail, time.monotonic() - began)


def _send_pings(database: Database, app: Celery) -> dict[str, str]:
    with database.writing() as session:
        pings = {queue: add_ping(session, queue, now=utc_now()) for queue in ALL_QUEUES}
    try:
        for queue, ping_id in pings.items():
            app.send_task("platemaker.ping", args=[ping_id], queue=queue, expires=ANSWER_S)
    except OperationalError as exc:
        raise BrokerUnavailable from exc
    return pings


def _queue_check(
    queue: str, answer: PingRow | None, workers: Sequence[WorkerRow], app: Celery, seconds: float
) -> Check:
    if answer is not None and answer.answered_at is not None:
        took_s = (answer.answered_at - answer.sent_at) / timedelta(seconds=1)
        late = abs(took_s) > seconds + CLOCK_S
        detail = f"answered by {answer.worker}" + (", whose clock is not this machine's" if late else "")
        return Check(queue, not late, detail, seconds)
    takers = [row.worker for row in workers if queue in row.queues]
    if not takers:
        return Check(
            queue, False, f"no worker takes it. Start one: platemaker worker {queue.partition('.')[0]}", seconds
        )
    busy = sum(len(tasks) for tasks in (app.control.inspect(timeout=INSPECT_S).active() or {}).values())
    if busy >= len(takers):
        return Check(queue, True, f"its {len(takers)} workers are alive and busy; none was free to answer", seconds)
    told = "Look at their logs and start them again"
    return Check(queue, False, f"{len(takers)} workers say they are alive, but none takes messages. {told}.", seconds)


def _alive(workers: Sequence[WorkerRow]) -> tuple[bool, str]:
    if not workers:
        return True, "none said that it is alive"
    pools = {pool: sum(row.pool == pool for row in workers) for pool in dict.fromkeys(row.pool for row in workers)}
    return False, ", ".join(f"{count} {pool}" for pool, count in pools.items())


def _clocks(workers: list[WorkerRow], own_s: float) -> tuple[bool, str]:
    """Each is held against the database's; SQLite has none, but then all is one machine."""
    ahead = {"this machine": own_s} | {row.worker: row.clock_ahead_s for row in workers}
    wrong = {name: off for name, off in ahead.items() if abs(off) > CLOCK_S}
    if wrong:
        told = ", ".join(f"{name} by {off:+.1f} s" for name, off in wrong.items())
        return True, f"off from the database's clock: {told}. Set them right (NTP)."
    return False, f"within {max(map(abs, ahead.values())):.2f} s of the database's"


def _agree(
    workers: Sequence[WorkerRow],
    value: Callable[[WorkerRow], str],
    what: str,
    *,
    own: str | None = None,
) -> tuple[bool, str]:
    found = {value(row): row.worker for row in workers} | ({own: "this command"} if own else {})
    if len(found) > 1:
        told = "; ".join(f"{which} at {where}" for which, where in found.items())
        return True, f"not one {what} but {len(found)}: {told}. Bring all to the same."
    return False, next(iter(found), "nothing to compare")
