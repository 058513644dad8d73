"""What every task of a process works with."""

import logging
import os
import random
import threading
import uuid
from dataclasses import dataclass, field

from kernels.settings import KernelSettings
from storage.breaker import Breaker, BreakerState
from storage.database import Database
from storage.errors import StorageError
from storage.limits import NO_LIMITS, Limits
from storage.objects import ObjectStore, open_store
from storage.retention import Lifetimes
from storage.settings import StorageSettings
from storage.ways import DocumentKey
from tasks.engine import Engine
from tasks.heartbeat import Heartbeat
from tasks.metrics import BREAKER_STATE, OUTAGES, note_transfer
from tasks.queues import EVERYTHING, Duty
from tasks.registry import worker_name
from tasks.residents import ResidentKey, Residents
from tasks.settings import TaskSettings
from tasks.texts import Texts

logger = logging.getLogger(__name__)
STOP_S = 30.0  # a chunk of a long document on a slow CPU


@dataclass
class Workplace:
    """Database, object store, model and heartbeat of one process. Owned by whoever opened it.

    Told to stop, it first drains: nothing is claimed any more, and what is under way goes on. Once `stopping` is set
    too, whatever is under way is given back.
    """

    database: Database
    store: ObjectStore
    engine: Engine
    settings: TaskSettings
    lifetimes: Lifetimes
    stopping: threading.Event = field(default_factory=threading.Event)
    limits: Limits = NO_LIMITS
    duty: Duty = EVERYTHING
    draining: threading.Event = field(default_factory=threading.Event)
    store_breaker: Breaker | None = None  # None: the store is asked however often it fails
    heartbeat: Heartbeat = field(init=False)
    residents: Residents = field(init=False)
    texts: Texts = field(init=False, default_factory=Texts)
    proved: set[ResidentKey] = field(init=False, default_factory=set)  # snapshots whose probe held in this process
    outage: StorageError | None = field(init=False, default=None)  # of the last task; None: it could work
    _outages_in_a_row: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.residents = Residents(self.settings.memory_cache_mb * 1_000_000)
        self.heartbeat = Heartbeat(self.database, lease_s=self.settings.lease_s)

    @classmethod
    def open(
        cls, storage: StorageSettings, kernel: KernelSettings, task: TaskSettings, duty: Duty = EVERYTHING
    ) -> "Workplace":
        stopping = threading.Event()
        breaker = Breaker(task.breaker_rule)
        BREAKER_STATE.labels("store").set_function(lambda: breaker.state.number)
        return cls(
            Database(storage, stopping=stopping),
            open_store(storage, stopping=stopping, note=note_transfer, breaker=breaker),
            Engine(kernel),
            task,
            Lifetimes.of(storage),
            stopping,
            storage.limits,
            duty,
            store_breaker=breaker,
        )

    @property
    def worker_name(self) -> str:
        return worker_name(os.getpid())

    @property
    def is_store_away(self) -> bool:
        """It failed so often that it is left alone for now."""
        return self.store_breaker is not None and self.store_breaker.state == BreakerState.OPEN

    def text(self, tenant: str, document_id: str) -> str:
        """
        Raises:
            ObjectMissing: the text is not stored any more.
            StoreUnusable: the store does not answer, and the text is not in memory.
        """
        return self.texts.get(self.store, DocumentKey(tenant, document_id))

    def new_owner(self) -> str:
        """A name for one run of one task; leases are held under it."""
        return f"{self.worker_name}:{uuid.uuid4().hex[:8]}"

    def note_outage(self, exc: StorageError) -> None:
        """Keeps the next task waiting, longer after each outage in a row: it would end the same way. What is to be
        done stays in the rows, and upkeep sends it again."""
        pause_s = min(self.settings.lease_s, self.settings.upkeep_s * 2**self._outages_in_a_row)
        logger.warning("%s The work is given back and taken up again later.", exc)
        OUTAGES.labels(type(exc).__name__).inc()
        self.outage = exc
        self._outages_in_a_row += 1
        self.draining.wait(random.uniform(0.5, 1.0) * pause_s)

    def note_work(self) -> None:
        self.outage, self._outages_in_a_row = None, 0

    def raise_outage(self) -> None:
        """
        Raises:
            StorageError: the last task could not use the store or the database.
        """
        if self.outage is not None:
            raise self.outage

    def may_claim(self) -> bool:
        """Whether new work may be begun."""
        return not self.draining.is_set()

    def leave_if_draining(self) -> None:
        """Ends the task under way where ending it costs nothing; what it holds is given back on the way out.

        Raises:
            SystemExit: this process has been told to stop.
        """
        if self.draining.is_set():
            raise SystemExit("stopping")

    def leave_if_stopping(self) -> None:
        """Ends the task under way, between two steps of the model; what it holds is given back on the way out.

        Raises:
            SystemExit: this process has been told to stop now.
        """
        if self.stopping.is_set():
            raise SystemExit("stopping")

    def drain(self) -> None:
        """Claims nothing any more; lets what is under way go on for `soft_stop_s`. Told a second time, ends it now.

        Safe in a signal handler.
        """
        if self.draining.is_set() or not self.settings.soft_stop_s:
            self._end_now()
            return
        self.draining.set()
        timer = threading.Timer(self.settings.soft_stop_s, self._end_now)
        timer.daemon = True
        timer.start()

    def _end_now(self) -> None:
        self.draining.set()
        self.stopping.set()

    def stop(self) -> None:
        """Tells the task under way to leave and waits until it has, or for STOP_S."""
        self._end_now()
        if self.engine.lock.acquire(timeout=STOP_S):
            self.engine.lock.release()

    def close(self) -> None:
        self.heartbeat.stop()
        self.database.close()
