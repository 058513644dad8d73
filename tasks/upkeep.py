"""Finding lost work in the rows, and ending what has lived long enough. Every worker does it, so no single process
must live for it."""

import logging
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from kombu.exceptions import OperationalError

from storage.database import Database, utc_now
from storage.deaths import release_dead_writers
from storage.errors import StorageError
from storage.items import recover_items, take_unkicked
from storage.retention import expire
from storage.snapshots import ready_manifests
from storage.sweep import prune_copies, sweep
from tasks.app import PlatemakerApp
from tasks.broker_memory import remembers_since
from tasks.errors import BrokerUnavailable
from tasks.metrics import PUT_BACK
from tasks.queue_depth import queue_depths
from tasks.settings import TaskSettings

if TYPE_CHECKING:
    from tasks.workplace import Workplace  # brings torch, which a submit host need not have

logger = logging.getLogger(__name__)
KICKS_AT_ONCE = 500
SWEEP_PAUSE_S = 600.0  # listing a large store takes its time, and every worker does it
PRUNE_PAUSE_S = 60.0  # how long copies on this host may outlive a `forget` on another
PATIENCE_WHILE_BUSY = 20  # leases a document waits before it is sent again although messages are still queued


def kick_waiting(app: PlatemakerApp, database: Database, settings: TaskSettings, *, limit: int = KICKS_AT_ONCE) -> int:
    """Sends a prefill message for each document with queued items for which none was sent lately, up to `limit`;
    returns how many.

    Raises:
        BrokerUnavailable: nothing could be sent; the rows stay and the next upkeep tries again.
    """
    patience = settings.lease_s * (PATIENCE_WHILE_BUSY if queued_messages(app) else 1)
    lost_before = remembers_since(app)
    now = utc_now()  # only now: what is sent here is not lost
    kicked_before = max(now - timedelta(seconds=patience), lost_before)
    try:
        with database.writing() as session:
            documents = take_unkicked(session, now=now, kicked_before=kicked_before, limit=limit)
            for document in documents:
                app.send_task("platemaker.prefill", args=[document.tenant, document.document_id])
    except OperationalError as exc:
        raise BrokerUnavailable from exc
    return len(documents)


def queued_messages(app: PlatemakerApp) -> int:
    """Messages in all queues that no worker has taken.

    Raises:
        BrokerUnavailable: the broker does not answer, or refuses the login.
    """
    return sum(queue_depths(app).values())


class Upkeep:
    """A thread that puts back what dead workers held, sends again what got lost, expires snapshots and sweeps."""

    def __init__(self, app: PlatemakerApp, place: "Workplace") -> None:
        self._app = app
        self._place = place
        self._database = place.database
        self._settings = place.settings
        self._swept_at: float | None = None
        self._pruned_at: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def once(self) -> None:
        with self._database.writing() as session:
            recovered = recover_items(session, now=utc_now(), max_attempts=self._settings.max_attempts)
        with self._database.writing() as session:
            recovered += release_dead_writers(session, now=utc_now())
        if recovered:
            PUT_BACK.inc(recovered)
            logger.warning("items put back", extra={"count": recovered})
        self._drop_residents()
        self._prune_copies()
        kick_waiting(self._app, self._database, self._settings)
        self._end_lifetimes()

    def _drop_residents(self) -> None:
        """Lets go of the KV in memory of snapshots that are out of use: expired, erased or written anew."""
        kept = self._place.residents.keys()
        if kept:
            with self._database.reading() as session:
                ready = ready_manifests(session, [key.snapshot_id for key in kept])
            self._place.residents.drop([key for key in kept if key not in ready])

    def _end_lifetimes(self) -> None:
        with self._database.writing() as session:
            expired = expire(session, self._place.lifetimes, now=utc_now())
        if expired:
            logger.info("snapshots expired", extra={"count": expired})
        if self._swept_at is None or time.monotonic() - self._swept_at >= SWEEP_PAUSE_S:
            # Noted before: a sweep that fails waits for its next turn too.
            self._swept_at = time.monotonic()
            swept = sweep(self._database, self._place.store, self._place.lifetimes, now=utc_now())
            logger.info("swept", extra=asdict(swept))

    def _prune_copies(self) -> None:
        if self._pruned_at is None or time.monotonic() - self._pruned_at >= PRUNE_PAUSE_S:
            self._pruned_at = time.monotonic()
            pruned = prune_copies(self._database, self._place.store)
            if pruned:
                logger.info("local copies pruned", extra={"count": pruned})

    def _run(self) -> None:
        while not self._stopped.wait(self._settings.upkeep_s):
            try:
                self.once()
            except (StorageError, BrokerUnavailable) as exc:
                logger.warning("Upkeep failed and will be tried again: %s", exc)
