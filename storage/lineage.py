"""What happened to a document's snapshots, one row an event. Never document text."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.schema import LineageRow, SnapshotRow


class Event(StrEnum):
    PUBLISHED = "published"
    RECOMPUTED = "recomputed"
    IMPORTED = "imported"
    QUARANTINED = "quarantined"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    EXPIRED = "expired"
    REMOVED = "removed"
    FORGOTTEN = "forgotten"
    RETRIED = "retried"
    WORKER_DIED = "worker died"


def note_event(
    session: Session,
    event: Event,
    *,
    tenant: str,
    document_id: str,
    snapshot_id: int | None,
    now: datetime,
    detail: str = "",
) -> None:
    session.add(
        LineageRow(
            at=now, tenant=tenant, document_id=document_id, snapshot_id=snapshot_id, event=event.value, detail=detail
        )
    )


def snapshot_lineage(session: Session, row: SnapshotRow) -> list[LineageRow]:
    """The snapshot's events, oldest first."""
    return list(
        session.scalars(
            select(LineageRow)
            .where(
                LineageRow.tenant == row.tenant,
                LineageRow.document_id == row.document_id,
                LineageRow.snapshot_id == row.snapshot_id,
            )
            .order_by(LineageRow.id)
        )
    )
