"""Finding lost work in the rows, and ending what has lived long enough. Every worker does it, so no single process
must live for it."""

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from kombu.exceptions import OperationalError
from sqlalchemy.orm import Session

from storage.database import Database, utc_now
from storage.deaths import release_dead_writers
from storage.documents import known_documents
from storage.errors import StorageError
from storage.items import recover_items
from storage.kicks import take_unkicked
from storage.retention import expire
from storage.snapshots import known_manifests
from storage.sweep import prune_copies, sweep
from storage.tiers import Stage, Tier
from storage.units import add_units, find_waiting, recover_units, redirect
from storage.ways import DocumentKey
from tasks.app import PlatemakerApp
from tasks.broker_memory import remembers_since
from tasks.errors import BrokerUnavailable
from tasks.metrics import PUT_BACK
from tasks.queue_depth import queue_depths
from tasks.queues import ALL_QUEUES, DECODE_QUEUES
from tasks.residents import is_current
from tasks.sending import send_hint
from tasks.settings import TaskSettings
from tasks.way import choose_fallbacks, choose_ways, look_at_pools, stage_of

if TYPE_CHECKING:
    from tasks.workplace import Workplace  # brings torch, which a submit host need not have

logger = logging.getLogger(__name__)
KICKS_AT_ONCE = 500
SWEEP_PAUSE_S = 600.0  # listing a large store takes its time, and every worker does it
PRUNE_PAUSE_S = 60.0  # how long copies on this host may outlive a `forget` on another
PATIENCE_WHILE_BUSY = 20  # leases a document waits before it is sent again although messages are still queued


def kick_waiting(
    app: PlatemakerApp,
    database: Database,
    settings: TaskSettings,
    *,
    limit: int = KICKS_AT_ONCE,
    first: str | None = None,
) -> int:
    """Sends a message for each document with queued items for which none was sent lately, up to `limit`, those of the
    job `first` before others, to where the way of its questions begins; returns how many.

    Raises:
        BrokerUnavailable: nothing could be sent; the rows stay and the next upkeep tries again.
    """
    patience = settings.lease_s * (PATIENCE_WHILE_BUSY if queued_messages(app) else 1)
    lost_before = remembers_since(app)
    now = utc_now()  # only now: what is sent here is not lost
    kicked_before = max(now - timedelta(seconds=patience), lost_before)
    try:
        with database.writing() as session:
            units = take_unkicked(session, now=now, kicked_before=kicked_before, limit=limit, first=first)
            keys = [DocumentKey(unit.tenant, unit.document_id) for unit in units]
            choices = choose_ways(session, keys, settings, now)
            for key, unit in zip(keys, units, strict=True):
                stage = stage_of(choices[key]) if key in choices else unit.stage
                send_hint(app, redirect(session, unit, stage, now=now))
    except OperationalError as exc:
        raise BrokerUnavailable from exc
    return len(units)


def take_over(app: PlatemakerApp, database: Database, settings: TaskSettings) -> int:
    """Sends to the decode pool what waits in vain for the prefill pool; returns how many documents. Of what only waits
    long, no more than there are idle decode workers: the prefill pool still comes to the others.

    Raises:
        BrokerUnavailable: nothing could be sent.
    """
    now = utc_now()
    with database.reading() as session:
        pools = look_at_pools(session, settings, now)
    if not pools.decoders:
        return 0
    limit = KICKS_AT_ONCE if pools.trouble else pools.decoders - _waiting_messages(app, DECODE_QUEUES)
    if limit <= 0:
        return 0
    try:
        with database.writing() as session:
            choices = choose_fallbacks(session, settings, now, limit=limit)
            for key, choice in choices.items():
                _send_anew(app, session, key, stage_of(choice), now)
    except OperationalError as exc:
        raise BrokerUnavailable from exc
    return len(choices)


def _send_anew(app: PlatemakerApp, session: Session, key: DocumentKey, stage: Stage, now: datetime) -> None:
    """Unless somebody is at it."""
    add_units(session, Stage.READ, key.tenant, [key.document_id], tier=Tier.BATCH, now=now)
    unit = find_waiting(session, Stage.READ, *key, now=now)
    if unit is not None:
        send_hint(app, redirect(session, unit, stage, now=now))


def queued_messages(app: PlatemakerApp) -> int:
    """Messages in all queues that no worker has taken.

    Raises:
        BrokerUnavailable: the broker does not answer, or refuses the login.
    """
    return _waiting_messages(app, ALL_QUEUES)


def _waiting_messages(app: PlatemakerApp, queues: Collection[str]) -> int:
    return sum(depth for queue, depth in queue_depths(app).items() if queue in queues)


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
        self._recover_units()
        self._drop_residents()
        self._prune_copies()
        kick_waiting(self._app, self._database, self._settings)
        taken = take_over(self._app, self._database, self._settings)
        if taken:
            logger.warning("documents sent to the decode pool", extra={"count": taken})
        self._end_lifetimes()

    def _recover_units(self) -> None:
        """What a dead worker held goes to another at once."""
        try:
            with self._database.writing() as session:
                for unit in recover_units(session, now=utc_now()):
                    send_hint(self._app, unit)
        except OperationalError as exc:
            raise BrokerUnavailable from exc

    def _drop_residents(self) -> None:
        """Lets go of the KV in memory of snapshots that are out of use: expired, erased or written anew; and of texts
        that were erased."""
        kept, texts = self._place.residents.keys(), self._place.texts.keys()
        with self._database.reading() as session:
            if kept:
                known = known_manifests(session, [key.snapshot_id for key in kept])
                self._place.residents.drop([key for key in kept if not is_current(key, known)])
            if texts:
                there = known_documents(session, texts)
                self._place.texts.drop([key for key in texts if key not in there])

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
