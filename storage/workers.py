"""Workers that are alive, and pings that they answer."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from storage.database import utc_now
from storage.schema import PingRow, WorkerRow

KEEP_PINGS = timedelta(hours=1)
FORGET_WORKERS = timedelta(days=1)  # a worker that died without a word is shown as gone for so long


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself; see WorkerRow."""

    worker: str
    pool: str
    queues: tuple[str, ...]
    version: str
    model: str
    engine_sha256: str
    started_at: datetime


def register(session: Session, info: WorkerInfo, *, now: datetime) -> None:
    """Writes or renews the worker's row; forgets those that have been silent for a day."""
    values = {**vars(info), "queues": list(info.queues)}
    session.merge(WorkerRow(**values, clock_ahead_s=clock_ahead_s(session), seen_at=now))
    session.execute(delete(WorkerRow).where(WorkerRow.seen_at < now - FORGET_WORKERS))


def unregister(session: Session, worker: str) -> None:
    session.execute(delete(WorkerRow).where(WorkerRow.worker == worker))


def live_workers(session: Session, *, seen_after: datetime) -> Sequence[WorkerRow]:
    """Those that were alive since then, by pool and name."""
    query = select(WorkerRow).where(WorkerRow.seen_at >= seen_after).order_by(WorkerRow.pool, WorkerRow.worker)
    return session.scalars(query).all()


def other_engine(session: Session, info: WorkerInfo, *, seen_after: datetime) -> WorkerRow | None:
    """A live worker that computes something else and was there before this one. Of two that start together, one."""
    others = (row for row in live_workers(session, seen_after=seen_after) if row.engine_sha256 != info.engine_sha256)
    return next((row for row in others if (row.started_at, row.worker) < (info.started_at, info.worker)), None)


def clock_ahead_s(session: Session) -> float:
    """How far this process's clock is ahead of the database's, to within the time of a query; 0 for SQLite, which
    has no clock of its own."""
    if session.get_bind().dialect.name == "sqlite":
        return 0.0
    before = utc_now()
    there: datetime = session.scalars(select(func.clock_timestamp())).one()
    after = utc_now()
    return (before - there + (after - before) / 2).total_seconds()


def add_ping(session: Session, queue: str, *, now: datetime) -> str:
    """A ping that waits for its answer; returns its id. Those of an hour ago are forgotten."""
    session.execute(delete(PingRow).where(PingRow.sent_at < now - KEEP_PINGS))
    ping_id = uuid.uuid4().hex
    session.add(PingRow(ping_id=ping_id, queue=queue, sent_at=now))
    return ping_id


def answer_ping(session: Session, ping_id: str, *, worker: str, now: datetime) -> None:
    """Notes who answered; nothing happens where the ping is answered or forgotten."""
    session.execute(
        update(PingRow)
        .where(PingRow.ping_id == ping_id, PingRow.answered_at.is_(None))
        .values(worker=worker, answered_at=now)
    )


def answered_pings(session: Session, ping_ids: Sequence[str]) -> dict[str, PingRow]:
    query = select(PingRow).where(PingRow.ping_id.in_(ping_ids), PingRow.answered_at.is_not(None))
    return {row.ping_id: row for row in session.scalars(query)}
