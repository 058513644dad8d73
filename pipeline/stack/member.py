"""A process of the stack, and when it is started again."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.local_servers import LocalServer

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # after so long the next crash counts as the first


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    CRASHED = "crashed"  # waits for its next start
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass
class Member:
    """Launches its server again when it ended, each time after a longer pause."""

    server: LocalServer
    address: str
    clock: Callable[[], float] = time.monotonic
    state: State = State.STOPPED
    restarts: int = 0
    was_ready: bool = False
    exit_code: int | None = None
    launched_at: float = 0.0
    _crashes_in_a_row: int = field(default=0, init=False)
    _again_at: float = field(default=0.0, init=False)

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def pid(self) -> int | None:
        return self.server.pid if self.state in (State.STARTING, State.READY) else None

    @property
    def waits_s(self) -> float:
        """Until it is started again."""
        return max(0.0, self._again_at - self.clock())

    def launch(self) -> None:
        self.server.launch()
        self.launched_at = self.clock()
        self.state = State.STARTING

    def started(self) -> None:
        """It was started by somebody else, and answers."""
        self.launched_at = self.clock()
        self.state, self.was_ready = State.READY, True

    def look(self) -> bool:
        """Whether anything changed: it is ready now, has ended, or was started again."""
        before = self.state
        if self.state == State.CRASHED:
            if not self.waits_s:
                self.restarts += 1
                self.launch()
        elif self.state in (State.STARTING, State.READY):
            self.exit_code = self.server.exit_code()
            if self.exit_code is not None:
                self._note_crash()
            elif self.state == State.STARTING and self.server.is_ready():
                self.state, self.was_ready = State.READY, True
        return self.state != before

    def _note_crash(self) -> None:
        if self.clock() - self.launched_at > SETTLED_S:
            self._crashes_in_a_row = 0
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._crashes_in_a_row)
        self._crashes_in_a_row += 1
        self._again_at = self.clock() + pause_s
        self.state = State.CRASHED

    def ask_to_stop(self) -> None:
        if self.pid is not None:
            self.server.ask_to_stop()
        self.state = State.STOPPING

    def stop(self) -> None:
        self.server.stop()
        self.state = State.STOPPED

    def last_line(self) -> str:
        """Of its log; of a program that refuses to start, why."""
        try:
            lines = self.server.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
