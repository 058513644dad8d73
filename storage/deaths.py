"""What dead workers held, and how they died where somebody knows it. See `items.recover_items` for questions."""

from datetime import datetime

from sqlalchemy import delete, or_, select, tuple_, update
from sqlalchemy.orm import Session

from storage.lineage import Event, note_event
from storage.schema import ItemRow, ItemState, SnapshotLeaseRow, SnapshotRow, SnapshotState, UnitRow
from storage.workers import unregister


def note_death(session: Session, worker: str, how: str, *, now: datetime) -> int:
    """Lets everything that the worker held run out now, instead of with its leases; the attempts stay counted. `how` it
    ended goes to the lineage of each snapshot that it read or wrote, and into what is said of a document that is set
    aside. Returns how many snapshots these were."""
    items = session.scalars(
        select(ItemRow)
        .where(ItemRow.owner.startswith(f"{worker}:", autoescape=True), ItemRow.state == ItemState.RUNNING)
        .order_by(ItemRow.item_id)
        .with_for_update(of=ItemRow)
    ).all()
    for item in items:
        item.lease_until, item.error = now, how
    session.flush()
    writes = SnapshotRow.owner.startswith(f"{worker}:", autoescape=True) & (SnapshotRow.state == SnapshotState.WRITING)
    its_leases = SnapshotLeaseRow.owner.startswith(f"{worker}:", autoescape=True)
    read = select(SnapshotLeaseRow.snapshot_id).where(its_leases)
    snapshots = session.execute(
        select(SnapshotRow.snapshot_id, SnapshotRow.tenant, SnapshotRow.document_id)
        .where(or_(writes, SnapshotRow.snapshot_id.in_(read)))
        .order_by(SnapshotRow.snapshot_id)
    ).all()
    for statement in (
        update(SnapshotRow).where(writes).values(lease_until=now),
        delete(SnapshotLeaseRow).where(its_leases),
        update(UnitRow).where(UnitRow.owner.startswith(f"{worker}:", autoescape=True)).values(lease_until=now),
    ):
        session.execute(statement.execution_options(synchronize_session=False))
    unregister(session, worker)
    for snapshot_id, tenant, document_id in snapshots:
        note_event(
            session,
            Event.WORKER_DIED,
            tenant=tenant,
            document_id=document_id,
            snapshot_id=snapshot_id,
            now=now,
            detail=f"{worker} by {how}",
        )
    return len(snapshots)


def release_dead_writers(session: Session, *, now: datetime) -> int:
    """Frees snapshots whose writer let its lease run out, and has a message sent for their documents at once: the one
    that the writer had is gone. Returns how many."""
    documents = session.execute(
        update(SnapshotRow)
        .where(SnapshotRow.state == SnapshotState.WRITING, SnapshotRow.lease_until < now)
        .values(owner=None, lease_until=None)
        .returning(SnapshotRow.tenant, SnapshotRow.document_id)
        .execution_options(synchronize_session=False)
    ).all()
    if documents:
        session.execute(
            update(ItemRow)
            .where(
                tuple_(ItemRow.tenant, ItemRow.document_id).in_(documents),
                ItemRow.state == ItemState.QUEUED,
            )
            .values(kicked_at=None)
            .execution_options(synchronize_session=False)
        )
    return len(documents)
