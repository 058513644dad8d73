"""Answers taken over from earlier jobs: the same question of the same document, under the same fingerprint."""

import json
from datetime import datetime
from typing import Any

from sqlalchemy import insert, not_, select, update
from sqlalchemy.orm import Session

from storage.endings import Move, is_over, note_moves
from storage.schema import AnswerRow, ItemRow, ItemState, JobRow, QuestionRow, SnapshotRow
from storage.waiting import asked_params


def carry_answers(
    session: Session, *, tenant: str, document_id: str, model: str, fingerprint: str, now: datetime
) -> int:
    """Ends the document's queued items of jobs with `reuse_answers` that were answered before from the snapshot of this
    fingerprint, whether or not that is still kept: text and parameters of the question are equal, and so is everything
    else that changes an answer. The answer is copied with its usage, and says which item it was first of.

    Returns how many.
    """
    waiting = session.execute(
        select(ItemRow.item_id, ItemRow.job_id, QuestionRow.text, QuestionRow.params)
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .join(QuestionRow, _is_of_item)
        .where(
            ItemRow.tenant == tenant,
            ItemRow.document_id == document_id,
            ItemRow.state == ItemState.QUEUED,
            JobRow.model == model,
            JobRow.reuse_answers,
            not_(is_over(now)),
        )
    ).all()
    if not waiting:
        return 0
    answers = _answers(session, tenant, document_id, fingerprint)
    found = {item.item_id: answers.get(_key(item.text, item.params)) for item in waiting}
    ended = session.execute(
        update(ItemRow)
        .where(ItemRow.item_id.in_([at for at, answer in found.items() if answer]), ItemRow.state == ItemState.QUEUED)
        .values(state=ItemState.ANSWERED, finished_at=now)
        .returning(ItemRow.item_id, ItemRow.job_id)
        .execution_options(synchronize_session=False)
    ).all()
    copies = []
    for item in ended:
        first = found[item.item_id]
        assert first is not None
        values = {column.key: getattr(first, column.key) for column in AnswerRow.__table__.columns}
        free = {"device_s": 0.0, "prefill_s": 0.0, "load_s": 0.0, "load_bytes": 0}
        copies.append({**values, **free, "item_id": item.item_id, "created_at": now, "carried_from": first.item_id})
    if copies:
        session.execute(insert(AnswerRow).returning(AnswerRow.item_id), copies)
    note_moves(session, [Move(item.job_id, ItemState.QUEUED, ItemState.ANSWERED) for item in ended], now)
    return len(ended)


_is_of_item = (QuestionRow.job_id == ItemRow.job_id) & (QuestionRow.position == ItemRow.question_position)


def _answers(session: Session, tenant: str, document_id: str, fingerprint: str) -> dict[str, AnswerRow]:
    """The newest answer to each question that was given, not carried, from the snapshot."""
    rows = session.execute(
        select(AnswerRow, QuestionRow.text, QuestionRow.params)
        .join(ItemRow, ItemRow.item_id == AnswerRow.item_id)
        .join(QuestionRow, _is_of_item)
        .join(SnapshotRow, SnapshotRow.snapshot_id == AnswerRow.snapshot_id)
        .where(
            ItemRow.tenant == tenant,
            ItemRow.document_id == document_id,
            ItemRow.state == ItemState.ANSWERED,
            SnapshotRow.fingerprint == fingerprint,
            AnswerRow.carried_from.is_(None),
        )
        .order_by(AnswerRow.item_id)
    ).all()
    return {_key(text, params): answer for answer, text, params in rows}


def _key(text: str, params: dict[str, Any]) -> str:
    return json.dumps([text, asked_params(params)], sort_keys=True)
