"""A worker's turns: units of work taken from the rows, and the messages that follow from ending them.

A message is a permission to do one unit, not an order to do a certain one: which it is, the rows say when it comes.
"""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress

from kombu.exceptions import OperationalError
from sqlalchemy.orm import Session

from storage.choice import candidates, fills_a_batch, share_of, take_one
from storage.database import utc_now
from storage.errors import StorageError
from storage.schema import SnapshotRow
from storage.tiers import Stage, Tier
from storage.units import (
    Unit,
    WaitingUnit,
    add_units,
    charge,
    drop_unit,
    end_unit,
    find_waiting,
    oldest_waiting,
    put_back_unit,
    redirect,
    take_this_unit,
)
from tasks.queues import queue_of
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
CLAIMS = 8  # batches that a document has before others that deserve it more are let in


class Turns:
    """What one task takes up and lets go of. `send` is given the units that a message is to be sent for."""

    def __init__(self, place: Workplace, send: Callable[[WaitingUnit], None]) -> None:
        self._place = place
        self._send_one = send

    def take(self, *, prefers: Stage) -> Unit | None:
        """The unit that deserves it most, of all that this worker is for; None: nothing waits that may be begun.

        A worker that reads and answers reads on while what waits for an answer fills no batch: a step takes hardly more
        time for the questions of several documents than for those of one.
        """
        stages = self._place.duty.pool.stages
        if prefers == Stage.ANSWER and Stage.READ in stages and not self._fills_a_batch():
            prefers = Stage.READ
        return self._take(sorted(stages, key=lambda stage: stage != prefers), self._place.duty.tiers.taken)

    def take_beside(self, unit: Unit) -> Unit | None:
        """One more of its tier to be answered beside it; None: there is none, or others are to be let in first."""
        return None if self.gives_way(unit) else self._take([Stage.ANSWER], [unit.tier])

    def take_this(self, stage: Stage, tenant: str, document_id: str, snapshot_id: int | None = None) -> Unit | None:
        """This unit, whatever else waits; None: another worker is at it."""
        with self._place.database.writing() as session:
            now = utc_now()
            of_document = (session, stage, tenant)
            add_units(*of_document, [document_id], tier=Tier.BATCH, now=now, snapshot_id=snapshot_id)
            return take_this_unit(
                *of_document,
                document_id,
                owner=self._place.new_owner(),
                now=now,
                lease_s=self._place.settings.lease_s,
            )

    def _take(self, stages: list[Stage], tiers: Collection[Tier]) -> Unit | None:
        place = self._place
        with place.database.reading() as session:
            found = candidates(session, stages=stages, tiers=tiers, limits=place.limits, now=utc_now())
        in_memory = {key.snapshot_id for key in place.residents.keys()}  # noqa: SIM118 # no dict
        for candidate in found:
            with place.database.writing() as session:
                unit = take_one(
                    session,
                    candidate,
                    limits=place.limits,
                    in_memory=in_memory,
                    owner=place.new_owner(),
                    now=utc_now(),
                    lease_s=place.settings.lease_s,
                )
            if unit is not None:
                return unit
        return None

    def _fills_a_batch(self) -> bool:
        size, tiers = self._place.engine.settings.max_batch, self._place.duty.tiers.taken
        with self._place.database.reading() as session:
            return fills_a_batch(session, size, tiers=tiers, now=utc_now())

    def gives_way(self, unit: Unit, *, claims: int = 0) -> bool:
        """Whether others are to be let in before more of the unit is claimed: what is fast, at once; those who deserve
        it more, after some batches."""
        duty = self._place.duty
        is_long = claims >= CLAIMS and claims % CLAIMS == 0
        tiers = [tier for tier in duty.tiers.taken if is_long or tier == Tier.FAST]
        if unit.tier == Tier.FAST and (not is_long or Tier.FAST not in tiers):
            return False
        limits, now = self._place.limits, utc_now()
        with self._place.database.reading() as session:
            found = candidates(session, stages=duty.pool.stages, tiers=tiers, limits=limits, now=now)
            if not found or (unit.tier == Tier.BATCH and found[0].tier == Tier.FAST):
                return bool(found)
            return found[0].share_s < share_of(session, unit.tenant, limits=limits, now=now)

    def end(self, unit: Unit, used_s: float) -> None:
        """The unit was worked on for so many seconds of the device. What of it still waits is sent again, and what its
        end makes room for."""
        with self._place.database.writing() as session:
            now = utc_now()
            charge(session, unit.tenant, used_s, now=now)
            left = end_unit(session, unit, model=self._place.engine.name, now=now)
            following = self._following(session, unit)
        self._send(following if left is None or left in following else [left, *following])

    def drop(self, unit: Unit) -> None:
        """Nothing more is to be done for the unit now; upkeep finds what still waits."""
        with self._place.database.writing() as session:
            drop_unit(session, unit)
            following = self._following(session, unit)
        self._send(following)

    def _following(self, session: Session, unit: Unit) -> list[WaitingUnit]:
        """Where a tenant may have so many at once only, messages for others have come and gone."""
        if self._place.limits.of(unit.tenant).running is None:
            return []
        return oldest_waiting(session, unit.tenant, now=utc_now())

    def put_back(self, unit: Unit) -> None:
        """Another may take it up at once."""
        with self._place.database.writing() as session:
            left = put_back_unit(session, unit)
        self._send([left] if left else [])

    def give_up(self, unit: Unit) -> None:
        """Database or store cannot be used: others may take it up, when upkeep sends it again."""
        with suppress(StorageError), self._place.database.writing() as session:
            put_back_unit(session, unit)

    def send_answering(self, unit: Unit) -> None:
        """Behind the reading of a document: its questions wait for an answer now."""
        with self._place.database.reading() as session:
            found = find_waiting(session, Stage.ANSWER, unit.tenant, unit.document_id, now=utc_now())
        self._send([found] if found else [])

    def send_again(self, stage: Stage, tenant: str, document_id: str, *, instead: Unit) -> None:
        """Sends a message again whose own unit still waits, since another was done for it: that one's own message may
        go to a worker that takes no such units."""
        with self._place.database.reading() as session:
            left = find_waiting(session, stage, tenant, document_id, now=utc_now())
        if left is not None and queue_of(left.stage, left.tier) != queue_of(instead.stage, instead.tier):
            self._send([left])

    def hand_over(self, unit: Unit, stage: Stage) -> None:
        """The document's work is to be done the other way."""
        with self._place.database.writing() as session:
            put_back_unit(session, unit)
            waiting = WaitingUnit(unit.stage, unit.tier, unit.tenant, unit.document_id, unit.snapshot_id)
            left = redirect(session, waiting, stage, now=utc_now())
            following = self._following(session, unit)
        self._send(following if left in following else [left, *following])

    def read_again(self, row: SnapshotRow, tier: Tier) -> None:
        """The document's snapshot is out of use and has to be made anew."""
        with self._place.database.writing() as session:
            add_units(session, Stage.READ, row.tenant, [row.document_id], tier=tier, now=utc_now())
        self._send([WaitingUnit(Stage.READ, tier, row.tenant, row.document_id, None)])

    def _send(self, units: list[WaitingUnit]) -> None:
        try:
            for unit in units:
                self._send_one(unit)
        except OperationalError:  # the rows keep it, and upkeep sends it
            logger.warning("no message could be sent")
