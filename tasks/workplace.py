"""What every task of a process works with."""

import os
import socket
import threading
import uuid
from dataclasses import dataclass, field

from kernels.settings import KernelSettings
from storage.database import Database
from storage.objects import ObjectStore, open_store
from storage.retention import Lifetimes
from storage.settings import StorageSettings
from tasks.engine import Engine
from tasks.heartbeat import Heartbeat
from tasks.residents import ResidentKey, Residents
from tasks.settings import TaskSettings

STOP_S = 30.0  # a chunk of a long document on a slow CPU


@dataclass
class Workplace:
    """Database, object store, model and heartbeat of one process. Owned by whoever opened it."""

    database: Database
    store: ObjectStore
    engine: Engine
    settings: TaskSettings
    lifetimes: Lifetimes
    heartbeat: Heartbeat = field(init=False)
    residents: Residents = field(init=False)
    proved: set[ResidentKey] = field(init=False, default_factory=set)  # snapshots whose probe held in this process
    stopping: threading.Event = field(init=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.residents = Residents(self.settings.memory_cache_mb * 1_000_000)
        self.heartbeat = Heartbeat(self.database, lease_s=self.settings.lease_s)

    @classmethod
    def open(cls, storage: StorageSettings, kernel: KernelSettings, task: TaskSettings) -> "Workplace":
        return cls(Database(storage), open_store(storage), Engine(kernel), task, Lifetimes.of(storage))

    @property
    def worker_name(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()}"

    def new_owner(self) -> str:
        """A name for one run of one task; leases are held under it."""
        return f"{self.worker_name}:{uuid.uuid4().hex[:8]}"

    def leave_if_stopping(self) -> None:
        """Ends the task under way, between two steps of the model; what it holds is given back on the way out.

        Raises:
            SystemExit: this process has been told to stop.
        """
        if self.stopping.is_set():
            raise SystemExit("stopping")

    def stop(self) -> None:
        """Tells the task under way to leave and waits until it has, or for STOP_S."""
        self.stopping.set()
        if self.engine.lock.acquire(timeout=STOP_S):
            self.engine.lock.release()

    def close(self) -> None:
        self.heartbeat.stop()
        self.database.close()
