"""Answering the waiting questions of a document from its snapshot, and those of others beside them."""

from contextlib import suppress

from storage.errors import OUTAGES, SnapshotMissing, StorageError, StoreUnusable
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import get_snapshot
from storage.tiers import Stage
from storage.units import Unit
from tasks.answering import Alone, Answering
from tasks.errors import WrongModel
from tasks.turns import Turns
from tasks.workplace import Workplace


def answer_unit(place: Workplace, turns: Turns, unit: Unit) -> bool:
    """Answers what waits for the unit's snapshot, and for others while there is room in the batch; snapshots that are
    out of use are made anew. False: nothing waited.

    Raises:
        WrongModel: the snapshot belongs to another model.
        StorageError: the store or the database does not answer.
    """
    try:
        with place.database.reading() as session:
            row = get_snapshot(session, unit.snapshot_id or 0)
    except SnapshotMissing:
        turns.drop(unit)
        return False
    if row.state != SnapshotState.READY:
        turns.drop(unit)
        turns.read_again(row, unit.tier)
        return True
    try:
        run = answer_from(place, turns, unit, row)
    except StoreUnusable:
        if place.is_store_away:  # whoever has the text may do without the snapshot
            turns.hand_over(unit, Stage.WHOLE)
        raise
    for each in run.lost:
        turns.read_again(each, unit.tier)
    return run.num_claimed > 0 or bool(run.lost)


def answer_waiting(place: Workplace, row: SnapshotRow) -> list[SnapshotRow]:
    """Answers what waits for this snapshot, whatever else does, and what there is room for beside it; sends no message.
    Returns the snapshots that are out of use, or were proved damaged and now are; their items wait for new ones.

    Raises:
        WrongModel: it belongs to another model.
    """
    turns = Turns(place, lambda _unit: None)
    unit = turns.take_this(Stage.ANSWER, row.tenant, row.document_id, row.snapshot_id)
    return [] if unit is None else answer_from(place, turns, unit, row).lost


def answer_from(
    place: Workplace,
    turns: Turns,
    unit: Unit,
    row: SnapshotRow,
    alone: Alone | None = None,
) -> Answering:
    """A whole run, which lets go of the unit.

    Raises:
        WrongModel: the snapshot belongs to another model.
    """
    try:
        place.engine.check_fingerprint(row.snapshot_id, row.fields)
    except WrongModel:
        turns.drop(unit)
        raise
    run = Answering(place, turns, unit, row, alone)
    with place.engine.lock:
        try:
            run.answer()
        except OUTAGES:
            with suppress(StorageError):
                run.give_back()
            run.close(turns.give_up)
            raise
        except Exception:
            # What is held comes back when its lease runs out, with the attempt counted, so that questions which always
            # fail end as failed and do not come round for ever.
            run.close(turns.drop)
            raise
        except BaseException:  # told to stop: an orderly way out, not an attempt
            run.give_back()
            raise
        finally:
            run.close()
    return run
