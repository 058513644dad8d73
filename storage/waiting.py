"""What waits for answers, and the snapshots it waits for."""

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, not_, or_, select
from sqlalchemy.orm import Session

from storage.endings import is_over
from storage.leases import is_leased
from storage.schema import READING, SPEC_PARAM, ItemRow, ItemState, JobRow, ReadingRow, SnapshotRow, SnapshotState


def is_to_be_asked() -> ColumnElement[bool]:
    """Of an item and its job in a query: it waits for an answer that has to be computed. Not so what waits for the
    snapshot alone, and what may have been answered before, until its document's prefill has looked."""
    looked = (
        exists()
        .where(ReadingRow.job_id == ItemRow.job_id, ReadingRow.document_id == ItemRow.document_id)
        .correlate(ItemRow)
    )
    return and_(ItemRow.question_position != READING, or_(not_(JobRow.reuse_answers), looked))


def asked_params(params: dict[str, Any]) -> dict[str, Any]:
    """Of a question's params those that change its answer."""
    return {name: value for name, value in params.items() if name != SPEC_PARAM}


def next_waiting_snapshot(
    session: Session, *, model: str, passed_over: Collection[int], now: datetime
) -> SnapshotRow | None:
    """The oldest ready snapshot that nobody reads while questions for the model wait for its document; not one of
    `passed_over`, and none on whose document a worker has died: whoever answers beside that one would die with it."""
    of_document = (
        ItemRow.tenant == SnapshotRow.tenant,
        ItemRow.document_id == SnapshotRow.document_id,
        ItemRow.state == ItemState.QUEUED,
    )
    waiting = (
        exists()
        .where(
            *of_document,
            JobRow.job_id == ItemRow.job_id,
            JobRow.model == model,
            not_(is_over(now)),
            is_to_be_asked(),
        )
        .correlate(SnapshotRow)
    )
    suspect = exists().where(*of_document, ItemRow.attempts > 0).correlate(SnapshotRow)
    return session.scalar(
        select(SnapshotRow)
        .where(
            SnapshotRow.state == SnapshotState.READY,
            SnapshotRow.snapshot_id.not_in(passed_over),
            ~is_leased(now),
            waiting,
            ~suspect,
        )
        .order_by(SnapshotRow.snapshot_id)
        .limit(1)
    )
