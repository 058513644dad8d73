"""The tasks that do the work. Their arguments say what was to be done when they were sent; rows say what is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from storage.database import utc_now
from storage.errors import OUTAGES
from storage.snapshots import get_snapshot
from storage.tiers import Stage
from storage.units import Unit
from storage.ways import DocumentKey
from tasks.app import app
from tasks.decode import answer_unit
from tasks.one_piece import answer_whole
from tasks.prefill import prepare_snapshot, watched
from tasks.sending import send_hint
from tasks.turns import Turns
from tasks.way import is_for_one_piece
from tasks.workplace import Workplace

MOST_EMPTY = 100  # units that nothing waits for any more: a task goes on to the next


@app.task(name="platemaker.prefill")  # type: ignore[untyped-decorator] # celery is untyped
def prefill_document(tenant: str, document_id: str) -> None:
    """A document waits to be read. Idempotent."""
    _do_next(Stage.READ, tenant, document_id)


@app.task(name="platemaker.decode")  # type: ignore[untyped-decorator] # celery is untyped
def decode_snapshot(snapshot_id: int) -> None:
    """Questions wait for answers from a snapshot. Idempotent: what is answered is not asked again."""
    place = app.require_workplace()
    with place.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
    _do_next(Stage.ANSWER, row.tenant, row.document_id)


@app.task(name="platemaker.answer")  # type: ignore[untyped-decorator] # celery is untyped
def answer_document(tenant: str, document_id: str) -> None:
    """A document's questions wait to be answered in one piece. Idempotent."""
    _do_next(Stage.WHOLE, tenant, document_id)


def _do_next(stage: Stage, tenant: str, document_id: str) -> None:
    """Does the unit that deserves it most, which need not be the message's own."""
    place = app.require_workplace()
    place.leave_if_draining()
    turns = Turns(place, partial(send_hint, app))
    unit = turns.take(prefers=stage)
    if unit is not None:
        turns.send_again(stage, tenant, document_id, instead=unit)
    for _ in range(MOST_EMPTY):
        if unit is None or _do(place, turns, unit):
            break
        unit = turns.take(prefers=stage)


def _do(place: Workplace, turns: Turns, unit: Unit) -> bool:
    """False: there was nothing to do for it here."""
    if unit.stage == Stage.ANSWER:
        return answer_unit(place, turns, unit)
    with _letting_go(turns, unit):
        return _read(place, turns, unit) if unit.stage == Stage.READ else answer_whole(place, turns, unit)


@contextmanager
def _letting_go(turns: Turns, unit: Unit) -> Iterator[None]:
    """Lets go of the unit when the block ends early."""
    try:
        yield
    except OUTAGES:
        turns.give_up(unit)
        raise
    except Exception:  # a later look, not the next worker at once, may find it mended
        turns.drop(unit)
        raise
    except BaseException:  # told to stop
        turns.put_back(unit)
        raise


def _read(place: Workplace, turns: Turns, unit: Unit) -> bool:
    began = time.perf_counter()
    with place.database.reading() as session:
        key = DocumentKey(unit.tenant, unit.document_id)
        is_other_way = is_for_one_piece(session, key, place.settings, utc_now())
    if is_other_way:
        turns.hand_over(unit, Stage.WHOLE)
        return False
    with place.heartbeat.holding(unit.owner), watched(place):
        snapshot_id = prepare_snapshot(place, unit.tenant, unit.document_id)
    turns.end(unit, time.perf_counter() - began)
    if snapshot_id is not None:
        turns.send_answering(unit)
    return snapshot_id is not None
