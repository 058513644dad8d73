"""Answers in one piece: who answers a document's questions has read it, and stores nothing of it."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kernels.errors import MemoryExceeded
from kernels.kv import PrefixKV
from kernels.prefill import Prefilled, prefill
from storage.database import utc_now
from storage.errors import StoreUnusable
from storage.schema import SnapshotRow
from storage.snapshots import WriteClaim, note_readings
from storage.tiers import Stage
from storage.units import Unit
from storage.ways import Choice, DocumentKey, Way, Why
from tasks.answering import Alone
from tasks.decode import answer_from
from tasks.errors import ReadingEnded
from tasks.loading import LoadedPrefix
from tasks.metrics import FALLBACKS, note_prefill
from tasks.progress import send_progress
from tasks.reading import begin_reading, fitting_prefix, go_on, note_found, reading, release_reading
from tasks.residents import unstored_key
from tasks.room import fitting_batch, require_room_to_read
from tasks.turns import Turns
from tasks.way import choose_ways
from tasks.work_spans import note_read, of_waiting
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)


def answer_whole(place: Workplace, turns: Turns, unit: Unit) -> bool:
    """Answers the document's waiting questions here, or hands it back to the prefill pool where that is the way now.
    False: nothing was done.

    Raises:
        StorageError: the text cannot be had now, or the database does not answer.
    """
    key = DocumentKey(unit.tenant, unit.document_id)
    with place.database.writing() as session:
        choices = choose_ways(session, [key], place.settings, utc_now(), is_store_away=place.is_store_away)
    if key not in choices:
        turns.drop(unit)
        return False
    choice = choices[key]
    if choice.way == Way.SPLIT or not answer_here(place, turns, unit, choice):
        turns.hand_over(unit, Stage.READ)
        return choice.way != Way.SPLIT
    return True


def answer_here(place: Workplace, turns: Turns, unit: Unit, choice: Choice) -> bool:
    """Reads the document and answers what waits for it, from its stored snapshot where one is ready and that is as
    good; lets go of the unit. False: the prefill pool has to make one, because that one turned out to be of no use, or
    the document does not fit here.

    Raises:
        StorageError: the text cannot be had now, or the database does not answer.
    """
    key = (unit.tenant, unit.document_id)
    ids = fitting_prefix(place, *key)
    if ids is None:
        turns.drop(unit)
        return True
    if choice.why != Why.MODE and not _fits(place, len(ids)):
        return False
    owner = place.new_owner()
    with place.heartbeat.holding(owner):
        begun = begin_reading(place, place.engine.fingerprint(*key, ids), ids, owner=owner)
        if begun is None:  # upkeep finds what still waits
            turns.drop(unit)
            return True
        if begun.claim is None and choice.why != Why.MODE:
            note_found(place, begun.row)
            try:
                return not answer_from(place, turns, unit, begun.row).lost
            except StoreUnusable:  # nor is it in memory or copied here
                again = turns.take_this(unit.stage, *key) if choice.why == Why.STORE_BREAKER else None
                if again is None:
                    raise
                unit = again
        if choice.way == Way.FALLBACK:
            FALLBACKS.labels(choice.why).inc()
        try:
            answer_from(place, turns, unit, begun.row, Alone(choice, ReadHere(ids, begun.claim, choice)))
        finally:
            release_reading(place, begun.claim)
    return True


def _fits(place: Workplace, num_tokens: int) -> bool:
    """Another device may have room for what does not fit here, and nobody asked for one piece."""
    try:
        require_room_to_read(place, num_tokens)
    except MemoryExceeded as exc:
        logger.warning("left to the prefill pool: %s", exc)
        return False
    return True


@dataclass(frozen=True)
class ReadHere:
    """Opens a document by reading it, or by what an earlier task of this process read. `claim` keeps others from
    reading it at the same time; None: its snapshot is ready, but not to be used."""

    ids: list[int]
    claim: WriteClaim | None
    choice: Choice

    @contextmanager
    def __call__(self, place: Workplace, row: SnapshotRow, owner: str) -> Iterator[LoadedPrefix]:
        """
        Raises:
            MemoryExceeded: it does not fit, not even with one question.
            ReadingEnded: it cannot be read, or nobody waits for it any more.
        """
        began = time.perf_counter()
        key = unstored_key(row.snapshot_id)
        kv = place.residents.get(key)
        max_batch, source = place.engine.settings.max_batch, "memory" if kv is not None else None
        computed_tokens, prefill_s = 0, 0.0
        if kv is None:
            max_batch = fitting_batch(place, row)
            done = self._read(place, row)
            kv, computed_tokens, prefill_s = done.kv, done.computed_tokens, done.prefill_s
            place.residents.keep(key, kv)
            note_prefill(prefill_s=prefill_s, computed_tokens=computed_tokens, num_tokens=kv.length)
        with place.database.writing() as session:
            note_readings(
                session,
                row,
                model=place.engine.name,
                computed_tokens=computed_tokens,
                prefill_s=prefill_s,
                now=utc_now(),
                is_stored=False,
            )
        read_s = time.perf_counter() - began
        yield LoadedPrefix(place, row, kv, None, max_batch, source, self.ids, read_s=read_s, is_proved=True)

    def _read(self, place: Workplace, row: SnapshotRow) -> Prefilled:
        engine, num_tokens = place.engine, len(self.ids)

        def between(_kv: PrefixKV, _start: int, stop: int) -> None:
            place.leave_if_stopping()
            go_on(place, row, self.claim, stop, is_last=stop == num_tokens)

        send_progress(document_id=row.document_id, tokens=num_tokens, snapshot="in one piece")
        key = DocumentKey(row.tenant, row.document_id)
        with reading(place, row, self.claim), of_waiting(place, "prefill", key) as span:
            span.note(way=self.choice.way, why=self.choice.why, tokens=num_tokens)
            require_room_to_read(place, num_tokens)
            kv = engine.model.new_kv(num_tokens, make_room=place.residents.make_room)
            done = prefill(engine.model, self.ids, stops=engine.chunk_stops(num_tokens), kv=kv, on_chunk=between)
            note_read(span, done)
            return done
        raise ReadingEnded(row.document_id)
