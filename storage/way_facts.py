"""What is known of documents that wait, for choosing their way."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, func, not_, select, tuple_
from sqlalchemy.orm import Session

from storage.endings import is_over
from storage.noted_ways import choice_of
from storage.schema import READING, DocumentRow, ItemRow, ItemState, JobRow, SnapshotRow, SnapshotState
from storage.waiting import queued_window
from storage.ways import Choice, DocumentKey, Way


@dataclass(frozen=True)
class WaitingFacts:
    """Of one document. `modes` are those of the jobs that wait (None: the settings'), `since` is when the oldest of
    them began to wait, `kicked_at` when a message was last sent for the item that waits for one longest."""

    questions: int
    wants_snapshot: bool
    modes: frozenset[str | None]
    since: datetime
    kicked_at: datetime | None
    num_chars: int
    is_ready: bool
    noted: Choice | None


def waiting_facts(session: Session, keys: Collection[DocumentKey], now: datetime) -> dict[DocumentKey, WaitingFacts]:
    """Of those of the documents that have queued items."""
    if not keys:
        return {}
    waiting = session.execute(
        select(
            ItemRow.tenant,
            ItemRow.document_id,
            JobRow.mode,
            func.count().label("items"),
            func.sum(case((ItemRow.question_position == READING, 1), else_=0)).label("readings"),
            func.min(func.coalesce(JobRow.not_before, JobRow.created_at)).label("since"),
            func.min(ItemRow.kicked_at).label("kicked_at"),
        )
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .where(
            tuple_(ItemRow.tenant, ItemRow.document_id).in_(list(keys)),
            ItemRow.state == ItemState.QUEUED,
            not_(is_over(now)),
        )
        .group_by(ItemRow.tenant, ItemRow.document_id, JobRow.mode)
    ).all()
    documents = session.execute(
        select(DocumentRow, _is_ready().label("is_ready")).where(
            tuple_(DocumentRow.tenant, DocumentRow.document_id).in_(list(keys))
        )
    ).all()
    by_document: dict[DocumentKey, list[Any]] = defaultdict(list)
    for row in waiting:
        by_document[DocumentKey(row.tenant, row.document_id)].append(row)
    found = {}
    for document, is_ready in documents:
        key = DocumentKey(document.tenant, document.document_id)
        rows = by_document.get(key)
        if rows is None:
            continue
        kicks = [row.kicked_at for row in rows if row.kicked_at is not None]
        found[key] = WaitingFacts(
            questions=sum(row.items - int(row.readings) for row in rows),
            wants_snapshot=any(row.readings for row in rows),
            modes=frozenset(row.mode for row in rows),
            since=min(row.since for row in rows),
            kicked_at=min(kicks, default=None),
            num_chars=document.num_chars,
            is_ready=is_ready,
            noted=choice_of(document.sent_way, document.sent_why),
        )
    return found


def long_sent(session: Session, *, kicked_before: datetime, now: datetime, limit: int) -> list[DocumentKey]:
    """Documents that a message was sent for before `kicked_before` and that nobody has read since or reads now, the
    longest first."""
    is_long_sent = ItemRow.kicked_at < kicked_before
    window = queued_window(is_long_sent, order=(ItemRow.kicked_at, ItemRow.item_id), documents=limit)
    longest = func.min(window.c.kicked_at)
    rows = session.execute(
        select(window.c.tenant, window.c.document_id)
        .join(DocumentRow, and_(DocumentRow.tenant == window.c.tenant, DocumentRow.document_id == window.c.document_id))
        .where(DocumentRow.sent_way == Way.SPLIT, ~_is_ready(), ~_is_written(now))
        .group_by(window.c.tenant, window.c.document_id)
        .order_by(longest)
        .limit(limit)
    )
    return [DocumentKey(*row) for row in rows]


def _is_ready() -> ColumnElement[bool]:
    return _has_snapshot(SnapshotRow.state == SnapshotState.READY)


def _is_written(now: datetime) -> ColumnElement[bool]:
    return _has_snapshot(SnapshotRow.state == SnapshotState.WRITING, SnapshotRow.lease_until >= now)


def _has_snapshot(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Of a document row in a query."""
    return (
        exists()
        .where(
            SnapshotRow.tenant == DocumentRow.tenant,
            SnapshotRow.document_id == DocumentRow.document_id,
            *conditions,
        )
        .correlate(DocumentRow)
    )
