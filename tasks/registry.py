"""A worker's entry among those that are alive."""

import logging
import socket
import threading
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING

from storage.database import utc_now
from storage.errors import StorageError
from storage.workers import WorkerInfo, other_engine, register, unregister
from tasks.errors import OtherModelServed

if TYPE_CHECKING:
    from tasks.workplace import Workplace  # brings torch, which an exporter need not have

logger = logging.getLogger(__name__)
LONGEST_PAUSE_S = 10.0


def worker_name(pid: int) -> str:
    """What the worker of this process id on this host calls itself."""
    return f"{socket.gethostname()}:{pid}"


class Registration:
    """A thread that says, three times a lease, that this worker is alive."""

    def __init__(self, place: "Workplace") -> None:
        self._place = place
        self._info = WorkerInfo(
            worker=place.worker_name,
            pool=place.duty.pool.value,
            queues=place.duty.queues,
            version=version("platemaker"),
            model=place.engine.name,
            engine_sha256=place.engine.sha256,
            started_at=utc_now(),
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)

    def start(self) -> None:
        """
        Raises:
            OtherModelServed: a live worker would give other answers, or make other snapshots.
        """
        self._beat()
        with self._place.database.reading() as session:
            other = other_engine(session, self._info, seen_after=alive_since(utc_now(), self._place.settings.lease_s))
        if other is not None:
            self._leave()
            raise OtherModelServed(other.worker, other.model)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
            self._leave()

    def _beat(self) -> None:
        with self._place.database.writing() as session:
            register(session, self._info, now=utc_now())

    def _leave(self) -> None:
        try:
            with self._place.database.writing() as session:
                unregister(session, self._info.worker)
        except StorageError as exc:
            logger.warning("The worker's row stays until it is too old: %s", exc)

    def _run(self) -> None:
        while not self._stopped.wait(min(LONGEST_PAUSE_S, self._place.settings.lease_s / 3)):
            try:
                self._beat()
            except StorageError as exc:
                logger.warning("The worker could not say that it is alive: %s", exc)


def alive_since(now: datetime, lease_s: float) -> datetime:
    """A worker that was silent since then counts as gone."""
    return now - timedelta(seconds=2 * lease_s)
