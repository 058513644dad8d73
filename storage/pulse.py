"""What happens now: how much waits for what, and how much was done in the last minute."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, exists, func, select
from sqlalchemy.orm import Session

from storage.schema import AnswerRow, ItemRow, ItemState, ReadingRow, SnapshotRow, SnapshotState

IN_MEMORY = "memory"  # of AnswerRow.loaded_from


@dataclass(frozen=True)
class Pulse:
    """Waiting items, by whether their document's snapshot is ready; then what was done since `since`: tokens of
    prefill, tokens of answers, answers in all and by worker, documents by how they were come by, and how often a
    snapshot was answered from, in all and from a worker's memory."""

    to_read: int
    to_answer: int
    read_tokens: int
    written_tokens: int
    answers: int
    answers_by_worker: dict[str, int]
    looked_up: int
    found_ready: int
    loads: int
    memory_loads: int


def pulse(session: Session, *, since: datetime) -> Pulse:
    ready = exists().where(
        SnapshotRow.tenant == ItemRow.tenant,
        SnapshotRow.document_id == ItemRow.document_id,
        SnapshotRow.state == SnapshotState.READY,
    )
    queued = session.scalars(select(func.count()).where(ItemRow.state == ItemState.QUEUED)).one()
    to_answer = session.scalars(select(func.count()).where(ItemRow.state == ItemState.QUEUED, ready)).one()
    workers = session.execute(
        select(
            AnswerRow.worker,
            func.count(),
            func.sum(AnswerRow.output_tokens),
            func.count(AnswerRow.loaded_from),
            func.sum(case((AnswerRow.loaded_from == IN_MEMORY, 1), else_=0)),
        )
        .where(AnswerRow.created_at >= since, AnswerRow.carried_from.is_(None))
        .group_by(AnswerRow.worker)
    ).all()
    readings = session.execute(
        select(ReadingRow.way, func.count(), func.sum(ReadingRow.computed_tokens))
        .where(ReadingRow.created_at >= since)
        .group_by(ReadingRow.way)
    ).all()
    return Pulse(
        to_read=queued - to_answer,
        to_answer=to_answer,
        read_tokens=sum(int(tokens) for _, _, tokens in readings),
        written_tokens=sum(int(tokens) for _, _, tokens, _, _ in workers),
        answers=sum(count for _, count, _, _, _ in workers),
        answers_by_worker={worker: count for worker, count, _, _, _ in workers},
        looked_up=sum(count for _, count, _ in readings),
        found_ready=sum(count for way, count, _ in readings if way == "found"),
        loads=sum(count for *_, count, _ in workers),
        memory_loads=sum(int(count) for *_, count in workers),
    )
