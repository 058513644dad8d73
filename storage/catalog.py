"""Snapshots as a person asks about them: which there are, of what, and what came from them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from storage.schema import (
    AnswerRow,
    ChunkRow,
    DocumentRow,
    ItemRow,
    JobRow,
    SectionRow,
    SnapshotChunkRow,
    SnapshotRow,
    SourceRow,
)

ID_BEGINNING = re.compile(r"[0-9a-f]{8,64}")  # shorter ones are too easily somebody else's


@dataclass(frozen=True)
class ListedSnapshot:
    """A row with the names its document was submitted under."""

    row: SnapshotRow
    sources: tuple[str, ...]


@dataclass(frozen=True)
class AnswersOfJob:
    job_id: str
    answers: int


def list_snapshots(session: Session, tenant: str, limit: int) -> list[ListedSnapshot]:
    """The newest snapshots of a tenant, whatever their state."""
    rows = session.scalars(
        select(SnapshotRow)
        .where(SnapshotRow.tenant == tenant)
        .order_by(SnapshotRow.created_at.desc(), SnapshotRow.snapshot_id.desc())
        .limit(limit)
    ).all()
    names = source_names(session, tenant, [row.document_id for row in rows])
    return [ListedSnapshot(row, names.get(row.document_id, ())) for row in rows]


def document_snapshots(session: Session, tenant: str, document_id: str) -> Sequence[SnapshotRow]:
    return session.scalars(
        select(SnapshotRow)
        .where(SnapshotRow.tenant == tenant, SnapshotRow.document_id == document_id)
        .order_by(SnapshotRow.created_at.desc())
    ).all()


def source_names(session: Session, tenant: str, document_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names each document was submitted under, each once; a section's with its number behind the document's."""
    found = session.execute(
        select(SourceRow.document_id, SourceRow.name)
        .where(SourceRow.tenant == tenant, SourceRow.document_id.in_(document_ids))
        .distinct()
        .order_by(SourceRow.name)
    ).all()
    names: dict[str, list[str]] = {}
    for document_id, name in found:
        names.setdefault(str(document_id), []).append(name)
    of_section = and_(SourceRow.job_id == SectionRow.job_id, SourceRow.document_id == SectionRow.document_id)
    sections = session.execute(
        select(SectionRow.section_id, SourceRow.name, SectionRow.position)
        .join(SourceRow, of_section)
        .where(SectionRow.tenant == tenant, SectionRow.section_id.in_(document_ids))
        .distinct()
        .order_by(SourceRow.name, SectionRow.position)
    ).all()
    for section_id, name, position in sections:
        names.setdefault(section_id, []).append(f"{name} (section {position + 1})")
    return {document_id: tuple(each) for document_id, each in names.items()}


def document_sections(session: Session, tenant: str, document_id: str) -> Sequence[str]:
    """The sections, in order, in which the newest job that had the document cut it; none: it was read whole."""
    newest = (
        select(SourceRow.job_id)
        .join(JobRow, JobRow.job_id == SourceRow.job_id)
        .where(SourceRow.tenant == tenant, SourceRow.document_id == document_id)
        .order_by(JobRow.created_at.desc())
        .limit(1)
        .scalar_subquery()
    )
    return session.scalars(
        select(SectionRow.section_id)
        .where(SectionRow.job_id == newest, SectionRow.document_id == document_id)
        .order_by(SectionRow.position)
    ).all()


def documents_called(session: Session, tenant: str, name: str) -> list[str]:
    """Ids of the documents that were submitted under this very name, or whose id begins with it."""
    found = set(
        session.scalars(
            select(SourceRow.document_id).where(
                SourceRow.tenant == tenant, SourceRow.name == name, SourceRow.document_id.is_not(None)
            )
        )
    )
    if ID_BEGINNING.fullmatch(name):
        for table in (DocumentRow, SnapshotRow):  # an imported snapshot may be there before its document
            begins = table.document_id.startswith(name)
            found |= set(session.scalars(select(table.document_id).where(table.tenant == tenant, begins)))
    return sorted(str(document_id) for document_id in found)


def answers_from(session: Session, snapshot_id: int) -> list[AnswersOfJob]:
    rows = session.execute(
        select(ItemRow.job_id, func.count())
        .join(AnswerRow, AnswerRow.item_id == ItemRow.item_id)
        .where(AnswerRow.snapshot_id == snapshot_id)
        .group_by(ItemRow.job_id)
        .order_by(ItemRow.job_id)
    ).all()
    return [AnswersOfJob(job_id, count) for job_id, count in rows]


def snapshot_chunks(session: Session, snapshot_id: int) -> Sequence[ChunkRow]:
    """In order, beginning with the first tokens."""
    return session.scalars(
        select(ChunkRow)
        .join(SnapshotChunkRow, SnapshotChunkRow.chunk_key == ChunkRow.chunk_key)
        .where(SnapshotChunkRow.snapshot_id == snapshot_id)
        .order_by(SnapshotChunkRow.position)
    ).all()


def last_prefill_rate(session: Session, weights: str) -> float | None:
    """Tokens per second of the last prefill of a model that computed anything; None: none was measured yet."""
    rows = session.execute(
        select(SnapshotRow.computed_tokens, SnapshotRow.prefill_s, SnapshotRow.fields)
        .where(SnapshotRow.computed_tokens > 0, SnapshotRow.prefill_s > 0)
        .order_by(SnapshotRow.ready_at.desc())
        .limit(50)
    ).all()
    rates = [tokens / seconds for tokens, seconds, fields in rows if seconds and fields.get("weights") == weights]
    return rates[0] if rates else None
