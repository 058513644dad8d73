"""How often documents were asked: for advice from what was done."""

from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from storage.schema import READING, ItemRow, JobRow, ReadingRow, SnapshotRow


class AskedDocument(NamedTuple):
    """Its prefix's tokens; how many jobs of the model asked it, and how many questions in all."""

    num_tokens: int
    jobs: int
    questions: int


def asked_documents(session: Session, tenant: str, model: str) -> list[AskedDocument]:
    """Of each document that has been read."""
    items = (
        select(
            ItemRow.document_id.label("document_id"),
            func.count(ItemRow.job_id.distinct()).label("jobs"),
            func.count().label("questions"),
        )
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .where(ItemRow.tenant == tenant, JobRow.model == model, ItemRow.question_position != READING)
        .group_by(ItemRow.document_id)
        .subquery()
    )
    lengths = (
        select(ReadingRow.document_id.label("document_id"), func.max(SnapshotRow.num_tokens).label("num_tokens"))
        .join(SnapshotRow, SnapshotRow.snapshot_id == ReadingRow.snapshot_id)
        .where(SnapshotRow.tenant == tenant)
        .group_by(ReadingRow.document_id)
        .subquery()
    )
    rows = session.execute(
        select(lengths.c.num_tokens, items.c.jobs, items.c.questions).join(
            items, items.c.document_id == lengths.c.document_id
        )
    )
    return [AskedDocument(*row) for row in rows]


def snapshot_bytes_per_token(session: Session, tenant: str, model: str) -> float | None:
    """As the model's snapshots were stored; None: none was."""
    of_model = (
        select(ReadingRow.snapshot_id)
        .join(JobRow, JobRow.job_id == ReadingRow.job_id)
        .where(JobRow.tenant == tenant, JobRow.model == model)
    )
    size, tokens = session.execute(
        select(func.sum(SnapshotRow.size_bytes), func.sum(SnapshotRow.num_tokens)).where(
            SnapshotRow.snapshot_id.in_(of_model), SnapshotRow.size_bytes > 0
        )
    ).one()
    return float(size) / float(tokens) if tokens else None
