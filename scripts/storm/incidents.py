"""How long it took until a fault had done its worst.

A worker that was killed, frozen or told to stop: from that moment until nothing that it held is in its name any more;
its questions wait again, or are taken or answered, and the snapshot that it wrote is free or written by another. A
server, or messages: from the moment that it and all other servers answer again until the next answer or snapshot is
committed.
"""

from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from storage.database import utc_now
from storage.lineage import Event
from storage.schema import OPEN_STATES, AnswerRow, ItemRow, ItemState, LineageRow, SnapshotRow, SnapshotState
from storm.faults import Fault


@dataclass
class Held:
    """Questions and snapshots, each with the one run of a task that holds it."""

    items: set[tuple[int, str | None]]
    snapshots: set[tuple[int, str | None]]

    @classmethod
    def by(cls, session: Session, worker: str) -> "Held":
        """Everything that a worker holds."""
        items = select(ItemRow.item_id, ItemRow.owner).where(
            ItemRow.owner.startswith(f"{worker}:", autoescape=True), ItemRow.state == ItemState.RUNNING
        )
        snapshots = select(SnapshotRow.snapshot_id, SnapshotRow.owner).where(
            SnapshotRow.owner.startswith(f"{worker}:", autoescape=True), SnapshotRow.state == SnapshotState.WRITING
        )
        return cls(
            {(at, owner) for at, owner in session.execute(items)},
            {(at, owner) for at, owner in session.execute(snapshots)},
        )

    def __str__(self) -> str:
        parts = [f"{len(self.items)} questions"] * bool(self.items) + ["a snapshot"] * bool(self.snapshots)
        return " and ".join(parts) or "nothing"


@dataclass(eq=False)
class Incident:
    """One fault and what came of it. `recovered_s` None: nothing was lost by it, or it is not settled."""

    fault: Fault
    at_s: float
    began: datetime = field(default_factory=utc_now)
    over: datetime | None = None
    held: Held | None = None
    recovered_s: float | None = None
    is_settled: bool = False

    @property
    def detail(self) -> str:
        victim = self.fault.victim
        return "" if victim is None else f"{victim.program.name}, held {self.held or 'what is not known'}"

    def end(self) -> None:
        self.over = utc_now()

    def look(self, session: Session) -> None:
        """Finds out what the victim held, and later whether it is all taken up again."""
        if self.fault.victim is not None:
            self._look_at_victim(session, self.fault.victim.name)
        elif self.over is not None:
            self._look_at_commits(session, self.over)

    def _look_at_victim(self, session: Session, name: str) -> None:
        if self.held is None:
            self.held = Held.by(session, name)
        now = Held.by(session, name)
        if not (now.items & self.held.items or now.snapshots & self.held.snapshots):
            if self.held.items or self.held.snapshots:
                self.recovered_s = (utc_now() - self.began).total_seconds()
            self.is_settled = True

    def _look_at_commits(self, session: Session, since: datetime) -> None:
        answered = session.scalar(select(func.min(AnswerRow.created_at)).where(AnswerRow.created_at > since))
        published = session.scalar(
            select(func.min(LineageRow.at)).where(
                LineageRow.at > since, LineageRow.event.in_((Event.PUBLISHED, Event.RECOMPUTED))
            )
        )
        found = min((at for at in (answered, published) if at is not None), default=None)
        if found is not None:
            self.recovered_s = (found - since).total_seconds()
            self.is_settled = True
        elif session.scalar(select(ItemRow.item_id).where(ItemRow.state.in_(OPEN_STATES)).limit(1)) is None:
            self.is_settled = True
