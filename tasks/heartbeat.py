"""A thread that keeps this process's leases alive while its tasks compute."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from storage.database import Database, utc_now
from storage.errors import StorageError
from storage.items import cancelled_items, renew_items
from storage.leases import renew_leases
from storage.snapshots import renew_writing
from storage.units import renew_units

logger = logging.getLogger(__name__)
CANCEL_POLL_S = 1.0


class Heartbeat:
    """Renews what each registered owner holds, three times per lease, and learns which items were cancelled.

    A worker that is frozen or dead sends no beat, so its leases run out and others take over.
    """

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s
        self._owners: dict[str, set[int]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def holding(self, owner: str) -> Iterator[None]:
        """Keeps the owner's leases alive inside the block."""
        with self._lock:
            self._owners[owner] = set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._owners[owner]

    def is_cancelled(self, owner: str, item_id: int) -> bool:
        return item_id in self._owners.get(owner, ())

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = min(CANCEL_POLL_S, self._lease_s / 3)
        while not self._stopped.wait(pause):
            with self._lock:
                owners = list(self._owners)
            try:
                self._beat(owners)
            except StorageError:
                logger.warning("heartbeat failed", extra={"owners": owners}, exc_info=True)

    def _beat(self, owners: list[str]) -> None:
        """In one transaction, however many documents a task answers at once."""
        if not owners:
            return
        now, cancelled = utc_now(), {}
        with self._database.writing() as session:
            for owner in owners:
                renew_items(session, owner, now=now, lease_s=self._lease_s)
                renew_writing(session, owner, now=now, lease_s=self._lease_s)
                renew_leases(session, owner, now=now, lease_s=self._lease_s)
                renew_units(session, owner, now=now, lease_s=self._lease_s)
                cancelled[owner] = cancelled_items(session, owner, now)
        with self._lock:
            for owner in self._owners.keys() & cancelled.keys():
                self._owners[owner] |= cancelled[owner]
