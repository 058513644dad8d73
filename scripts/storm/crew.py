"""The servers and workers of one seed, each a real process, stopped by its own id."""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from pipeline.local_servers import LocalServer, Postgres, SeaweedFS, Valkey
from pipeline.stack.program import Program
from storage.database import Database
from storage.objects import ObjectStore, open_store
from storage.settings import StorageSettings
from tasks.app import PlatemakerApp, configure
from tasks.registry import worker_name
from tasks.settings import TaskSettings

POOLS = ("prefill", "prefill", "decode", "decode")
BUCKET = "platemaker"
LEAVE_S = 60.0


@dataclass(eq=False)
class Worker:
    """A `platemaker worker` process. `was_ready`: it has answered its /ready."""

    pool: str
    program: Program
    pid: int
    was_ready: bool = False
    is_frozen: bool = False

    @property
    def name(self) -> str:
        """As it calls itself; what it holds is held under names that begin so."""
        return worker_name(self.pid)

    def send(self, number: signal.Signals) -> None:
        if self.program.exit_code() is None:  # our child, not yet waited for: its id is nobody else's
            os.kill(self.pid, number)

    def end(self) -> None:
        """With SIGKILL, which ends a frozen process too."""
        self.program.kill()


class Crew:
    """Workers, two of each pool if nothing else is said, beside Valkey, SeaweedFS (or a folder) and PostgreSQL. What
    ends is replaced at once."""

    def __init__(
        self, folder: Path, settings: Mapping[str, str], pools: Sequence[str] = POOLS, *, store_in_folder: bool = False
    ) -> None:
        self.folder = folder
        self.lease_s = float(settings["PLATEMAKER_LEASE_S"])
        self.broker = Valkey(folder / "valkey", None)
        self.store_server = SeaweedFS(folder / "seaweedfs", BUCKET)
        self.database_server = Postgres(folder / "postgres")
        self._store_url = str(folder / "store") if store_in_folder else self.store_server.url
        self.workers: list[Worker] = []
        self.leaving: list[Worker] = []
        self.ended_alone: list[str] = []
        self.bad_ends: list[str] = []
        self._settings, self._pools = dict(settings), pools
        self._started = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Servers up, tables made, workers launched; at the end everything is gone."""
        servers: list[LocalServer] = [self.broker, self.database_server]
        if self._store_url == self.store_server.url:
            servers.append(self.store_server)
        try:
            for server in servers:
                server.dies_with_us = True
                server.start()
            self._settings |= self._addresses()
            with closing(Database(self.storage_settings)) as database, closing(self._open_store()) as store:
                self.database, self.store = database, store
                database.upgrade()
                for pool in self._pools:
                    self.launch(pool)
                yield
        finally:
            for worker in [*self.workers, *self.leaving]:
                worker.end()
            for server in servers:
                server.kill()

    @property
    def task_settings(self) -> TaskSettings:
        return TaskSettings(broker_url=SecretStr(self.broker.url), lease_s=self.lease_s)

    @property
    def app(self) -> PlatemakerApp:
        """Sends messages from this process."""
        return configure(self.task_settings)

    def choosable(self) -> list[Worker]:
        """Those beside which another of their pool works: else the time that one takes to start would be measured."""
        working = [worker for worker in self.workers if worker.was_ready and not worker.is_frozen]
        pools = [worker.pool for worker in working]
        return [worker for worker in working if pools.count(worker.pool) > 1]

    def replace(self, worker: Worker) -> None:
        """Starts another in its place."""
        self.workers.remove(worker)
        self.launch(worker.pool)

    def tend(self) -> bool:
        """Notes who is ready now, replaces whoever ended by itself, and sees off those that were told to stop. True:
        all are ready."""
        for worker in list(self.workers):
            code = worker.program.exit_code()
            if code is not None:
                self.ended_alone.append(f"{worker.program.name}: status {code}")
                worker.end()
                self.replace(worker)
            elif not worker.was_ready and not worker.is_frozen:
                worker.was_ready = worker.program.is_ready()
        for worker in list(self.leaving):
            self.see_off(worker)
        return all(worker.was_ready for worker in self.workers)

    def see_off(self, worker: Worker) -> bool:
        """Whether a worker that was told to stop has ended; any status but 0 is noted."""
        code = worker.program.exit_code()
        if code is not None and worker in self.leaving:
            self.leaving.remove(worker)
            if code:
                self.bad_ends.append(f"{worker.program.name}: status {code}")
        return worker not in self.leaving

    def dismiss(self, worker: Worker) -> None:
        """Tells it to stop, as an operator does."""
        self.workers.remove(worker)
        self.leaving.append(worker)
        worker.send(signal.SIGTERM)

    def dismiss_all(self) -> None:
        """Tells every worker to stop and waits until all have; one that does not is killed, and its end a bad one.
        What is not ready yet is killed: it has not learnt what SIGTERM means."""
        for worker in list(self.workers):
            if worker.was_ready:
                self.dismiss(worker)
            else:
                worker.end()
        deadline = time.monotonic() + LEAVE_S
        while self.leaving:
            for worker in list(self.leaving):
                self.see_off(worker)
            if time.monotonic() > deadline:
                for worker in self.leaving:
                    worker.end()
                    self.bad_ends.append(f"{worker.program.name}: did not end in {LEAVE_S:.0f} s")
                self.leaving.clear()
            time.sleep(0.1)

    def launch(self, pool: str) -> None:
        self._started += 1
        name = f"{pool}-{self._started}"
        program = Program(
            self.folder / "logs",
            name,
            ["worker", pool],
            self._settings,
            port_setting="PLATEMAKER_METRICS_PORT",
            ready_path="/ready",
        )
        program.dies_with_us = True
        program.launch()
        self.workers.append(Worker(pool, program, program.pid))

    def _addresses(self) -> dict[str, str]:
        return {
            "PLATEMAKER_BROKER_URL": self.broker.url,
            "PLATEMAKER_DATABASE_URL": self.database_server.url,
            "PLATEMAKER_STORE_URL": self._store_url,
            "PLATEMAKER_S3_ENDPOINT_URL": self.store_server.endpoint_url,
            "PLATEMAKER_S3_ACCESS_KEY_ID": self.store_server.access_key_id,
            "PLATEMAKER_S3_SECRET_ACCESS_KEY": self.store_server.secret_access_key,
            "PLATEMAKER_DATA_DIR": str(self.folder / "data"),
        }

    @property
    def storage_settings(self) -> StorageSettings:
        """Of this process, which waits for nothing: what does not answer is asked again in the next round."""
        own = {
            "data_dir": self.folder / "chaos",
            "database_url": SecretStr(self.database_server.url),
            "store_url": self._store_url,
            "patience_s": 0.0,
            "local_copies_mb": 0,
        }
        return self.store_server.settings().model_copy(update=own)

    def _open_store(self) -> ObjectStore:
        return open_store(self.storage_settings)
