"""What every task of a process works with."""

import os
import socket
import uuid
from dataclasses import dataclass, field

from kernels.settings import KernelSettings
from storage.database import Database
from storage.objects import ObjectStore, open_store
from storage.retention import Lifetimes
from storage.settings import StorageSettings
from tasks.engine import Engine
from tasks.heartbeat import Heartbeat
from tasks.settings import TaskSettings


@dataclass
class Workplace:
    """Database, object store, model and heartbeat of one process. Owned by whoever opened it."""

    database: Database
    store: ObjectStore
    engine: Engine
    settings: TaskSettings
    lifetimes: Lifetimes
    heartbeat: Heartbeat = field(init=False)

    def __post_init__(self) -> None:
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

    def close(self) -> None:
        self.heartbeat.stop()
        self.database.close()
