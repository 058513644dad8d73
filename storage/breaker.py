"""Circuit breakers: what keeps failing is left alone for a while, then tried by one, then used again.

closed -> open          after so many failures within the window, with no success between them
open -> half-open       once the cool-down is over
half-open -> closed     the one probe that is let through succeeds, or anything else does
half-open -> open       the probe fails
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"

    @property
    def number(self) -> int:
        """For metrics: the worse, the higher."""
        return list(BreakerState).index(self)


@dataclass(frozen=True)
class BreakerRule:
    failures: int
    window_s: float
    cool_down_s: float


@dataclass
class Breaker:
    """One process's own, safe to use from several threads: for what it alone can see, as whether the store can be
    reached from this host."""

    rule: BreakerRule
    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _failing_since: float = 0.0
    _opened_at: float | None = None
    _is_probed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        is_over = self.clock() - self._opened_at >= self.rule.cool_down_s
        return BreakerState.HALF_OPEN if is_over else BreakerState.OPEN

    def lets_through(self) -> bool:
        """Whether to try. Whoever is let through says afterwards how it went."""
        with self._lock:
            if self.state == BreakerState.HALF_OPEN and not self._is_probed:
                self._is_probed = True
                return True
            return self.state == BreakerState.CLOSED

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._opened_at, self._is_probed = 0, None, False

    def failed(self) -> None:
        with self._lock:
            now = self.clock()
            if self._opened_at is not None:
                if self._is_probed:
                    self._opened_at, self._is_probed = now, False
                return
            if not self._failures or now - self._failing_since > self.rule.window_s:
                self._failures, self._failing_since = 0, now
            self._failures += 1
            if self._failures >= self.rule.failures:
                self._opened_at = now
