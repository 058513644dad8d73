"""Asking again what does not answer: the object store and the database."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from storage.errors import StorageError

logger = logging.getLogger(__name__)
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0

Result = TypeVar("Result")


class Patience:
    """What the callers of one store or database know together: since when it is away, and that somebody said so.

    From its first failure until anything succeeds it counts as away. Once that has lasted for `patience_s`, a call
    asks once more and no longer waits.
    """

    def __init__(self, patience_s: float, *, stopping: threading.Event | None = None) -> None:
        self.patience_s = patience_s
        self._stopping = stopping or threading.Event()
        self._away: dict[str, float] = {}  # empty, or "since"; a dict because `setdefault` needs no lock after a fork

    def call(self, work: Callable[[], Result]) -> Result:
        """What `work` returns; it is repeated whole after a StorageError that is retryable."""
        asking = Asking(self)
        while True:
            try:
                found = work()
            except StorageError as exc:
                asking.wait_or_raise(exc)
            else:
                self.succeeded()
                return found

    def succeeded(self) -> None:
        if self._away.pop("since", None) is not None:
            logger.info("answers again")

    def failed(self, exc: StorageError) -> float:
        """Notes it; returns since when it is away. Only the first one is told."""
        now = time.monotonic()
        since = self._away.setdefault("since", now)
        if since is now and self.patience_s:
            logger.warning("%s Asking again for up to %g s.", exc, self.patience_s)
        return since

    def wait(self, pause_s: float) -> bool:
        """False: this process has been told to stop."""
        return not self._stopping.wait(pause_s)


class Asking:
    """One call's own share: others may succeed all the while that its object cannot be had."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def wait_or_raise(self, exc: StorageError) -> None:
        """Returns when it is time to ask again; else raises `exc`."""
        if not exc.retryable:
            raise exc
        away_since = self._patience.failed(exc)
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left_s = min(away_since, self._since) + self._patience.patience_s - now
        pause_s = min(left_s, random.uniform(0.5, 1.0) * self._pause_s)
        if pause_s <= 0 or not self._patience.wait(pause_s):
            raise exc
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
