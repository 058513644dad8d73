"""The decode task: answers the waiting questions of a document from its snapshot, and those of others beside them."""

from contextlib import suppress

from storage.errors import OUTAGES, StorageError
from storage.items import queued_items
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import get_snapshot
from tasks.answering import Answering
from tasks.app import app
from tasks.workplace import Workplace


@app.task(name="platemaker.decode")  # type: ignore[untyped-decorator] # celery is untyped
def decode_snapshot(snapshot_id: int) -> None:
    """Answers every queued question of the snapshot's document. Idempotent: what is answered is not asked again."""
    place = app.require_workplace()
    place.leave_if_draining()
    with place.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
        waiting = queued_items(session, tenant=row.tenant, document_id=row.document_id, model=place.engine.name)
    if not waiting:
        return
    lost = answer_waiting(place, row) if row.state == SnapshotState.READY else [row]
    for each in lost:
        app.send_task("platemaker.prefill", args=[each.tenant, each.document_id])


def answer_waiting(place: Workplace, row: SnapshotRow) -> list[SnapshotRow]:
    """Answers what waits for this snapshot, and for others while there is room in the batch. Returns the snapshots that
    are out of use, or were proved damaged and now are; their items wait for new ones.

    Raises:
        WrongModel: it belongs to another model.
    """
    place.engine.check_fingerprint(row.snapshot_id, row.fields)
    run = Answering(place, row)
    with place.engine.lock:
        try:
            run.answer()
        except OUTAGES:
            with suppress(StorageError):
                run.give_back()
            raise
        except Exception:
            # What is held comes back when its lease runs out, with the attempt counted, so that questions which always
            # fail end as failed and do not come round for ever.
            raise
        except BaseException:  # told to stop: an orderly way out, not an attempt
            run.give_back()
            raise
        finally:
            run.close()
    return run.lost
