"""Erasure: everything that was made of a document goes, and a tombstone stays as proof.

First nobody may use it any more, then the objects go, then the rows: cut off anywhere, doing it again ends it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, exists, not_, select, union, update
from sqlalchemy.orm import Session, aliased

from storage.database import Database
from storage.documents import text_key
from storage.endings import Move, note_moves
from storage.errors import DocumentUnknown
from storage.lineage import Event, note_event
from storage.manifest import manifest_object_key
from storage.objects import ObjectStore
from storage.schema import (
    AnswerRow,
    ChunkRow,
    DocumentRow,
    ItemRow,
    ItemState,
    JobRow,
    ReadingRow,
    SectionRow,
    ShareRow,
    SnapshotChunkRow,
    SnapshotLeaseRow,
    SnapshotRow,
    SnapshotState,
    SourceRow,
    TombstoneRow,
    UnitRow,
)
from storage.sweep import delete_unused_chunks


@dataclass(frozen=True)
class Forgotten:
    """What was deleted, as the tombstone keeps it. `sources` keep their rows, with the error "forgotten"."""

    documents: int = 0
    sources: int = 0
    items: int = 0
    answers: int = 0
    snapshots: int = 0
    chunks: int = 0

    def __add__(self, other: "Forgotten") -> "Forgotten":
        return Forgotten(**{name: count + getattr(other, name) for name, count in asdict(self).items()})


def forget_document(
    database: Database, store: ObjectStore, tenant: str, document_id: str, *, now: datetime
) -> Forgotten:
    """Erases one document of a tenant, with the sections it was read in. A section that another document holds too
    stays for that one. Of an interrupted erasure, the counts are those of its last run.

    Raises:
        DocumentUnknown: this tenant has no such document.
    """
    if document_id not in _documents(database, tenant):
        raise DocumentUnknown(document_id)
    counts = _erase_sections(database, store, tenant, document_id, now)
    counts += _erase(database, store, tenant, document_id, now)
    with database.writing() as session:
        _bury(session, tenant, document_id, counts, now)
    return counts


def forget_tenant(database: Database, store: ObjectStore, tenant: str, *, now: datetime) -> Forgotten:
    """Erases all documents of a tenant and whatever else is stored for it. Its jobs stay, with nothing in them."""
    counts = Forgotten()
    for document_id in _documents(database, tenant):
        counts += _erase(database, store, tenant, document_id, now)
    with database.reading() as session:
        left = session.scalars(
            select(ChunkRow.chunk_key).where(ChunkRow.tenant == tenant).order_by(ChunkRow.chunk_key)
        ).all()
    counts += Forgotten(chunks=len(delete_unused_chunks(database, store, left, now)))
    for prefix in (f"documents/{tenant}/", f"manifests/{tenant}/"):
        for key in list(store.keys(prefix)):
            store.delete(key)
    with database.writing() as session:
        session.execute(delete(ShareRow).where(ShareRow.tenant == tenant))
        _bury(session, tenant, None, counts, now)
    return counts


def _documents(database: Database, tenant: str) -> list[str]:
    with database.reading() as session:
        return list(
            session.scalars(
                union(
                    select(DocumentRow.document_id).where(DocumentRow.tenant == tenant),
                    select(SnapshotRow.document_id).where(SnapshotRow.tenant == tenant),
                )
            )
        )


def _erase_sections(database: Database, store: ObjectStore, tenant: str, document_id: str, now: datetime) -> Forgotten:
    """Their rows go with the document's own, so that an erasure that is cut off finds them again."""
    of_document = (SectionRow.tenant == tenant, SectionRow.document_id == document_id)
    other = aliased(SectionRow)
    of_other = and_(other.tenant == tenant, other.section_id == SectionRow.section_id, other.document_id != document_id)
    source = and_(SourceRow.tenant == tenant, SourceRow.document_id == SectionRow.section_id)
    with database.reading() as session:
        alone = session.scalars(
            select(SectionRow.section_id)
            .where(*of_document, not_(exists().where(of_other)), not_(exists().where(source)))
            .distinct()
            .order_by(SectionRow.section_id)
        ).all()
    counts = Forgotten()
    for section_id in alone:
        counts += replace(_erase(database, store, tenant, section_id, now), documents=0)
    in_job = (
        SectionRow.job_id == ItemRow.job_id,
        SectionRow.section_id == ItemRow.document_id,
    )
    as_source = (SourceRow.job_id == ItemRow.job_id, SourceRow.document_id == ItemRow.document_id)
    with (
        database.writing() as session
    ):  # what is left is shared: its answers go where they were for this document alone
        only_here = and_(
            exists().where(*of_document, *in_job).correlate(ItemRow),
            not_(exists().where(SectionRow.document_id != document_id, *in_job).correlate(ItemRow)),
            not_(exists().where(*as_source).correlate(ItemRow)),
        )
        answers, items = _delete_items(session, and_(ItemRow.tenant == tenant, only_here), now)
    return counts + Forgotten(items=items, answers=answers)


def _erase(database: Database, store: ObjectStore, tenant: str, document_id: str, now: datetime) -> Forgotten:
    with database.writing() as session:
        of_document = and_(ItemRow.tenant == tenant, ItemRow.document_id == document_id)
        answers, items = _delete_items(session, of_document, now)
        _delete_work(session, tenant, document_id)
        snapshots = _take_out_of_use(session, tenant, document_id)
    ids = [snapshot.snapshot_id for snapshot in snapshots]
    for snapshot in snapshots:
        store.delete(manifest_object_key(tenant, document_id, snapshot.fingerprint))
    store.delete(text_key(tenant, document_id))
    with database.writing() as session:
        keys = _drop_chunk_references(session, ids)
    chunks = delete_unused_chunks(database, store, keys, now)
    with database.writing() as session:
        session.execute(delete(SnapshotRow).where(SnapshotRow.snapshot_id.in_(ids)))
        sources = session.scalars(
            update(SourceRow)
            .where(SourceRow.tenant == tenant, SourceRow.document_id == document_id)
            .values(
                document_id=None,
                page_starts=[],
                pages_without_text=[],
                error_code="forgotten",
                error="This document was forgotten on request.",
            )
            .returning(SourceRow.position)
            .execution_options(synchronize_session=False)
        ).all()
        session.execute(delete(SectionRow).where(SectionRow.tenant == tenant, SectionRow.document_id == document_id))
        session.execute(delete(DocumentRow).where(DocumentRow.tenant == tenant, DocumentRow.document_id == document_id))
        note_event(session, Event.FORGOTTEN, tenant=tenant, document_id=document_id, snapshot_id=None, now=now)
    return Forgotten(1, len(sources), items, answers, len(ids), len(chunks))


def _delete_items(session: Session, which: ColumnElement[bool], now: datetime) -> tuple[int, int]:
    """Answers go with their items. What a worker is just answering is dropped when it comes."""
    answered = select(ItemRow.item_id).where(which)
    answers = session.scalars(
        delete(AnswerRow)
        .where(AnswerRow.item_id.in_(answered))
        .returning(AnswerRow.item_id)
        .execution_options(synchronize_session=False)
    ).all()
    items = session.execute(
        delete(ItemRow)
        .where(which)
        .returning(ItemRow.job_id, ItemRow.state)
        .execution_options(synchronize_session=False)
    ).all()
    note_moves(session, [Move(item.job_id, ItemState(item.state), None) for item in items], now)
    return len(answers), len(items)


def _delete_work(session: Session, tenant: str, document_id: str) -> None:
    session.execute(delete(UnitRow).where(UnitRow.tenant == tenant, UnitRow.document_id == document_id))
    jobs = select(JobRow.job_id).where(JobRow.tenant == tenant)
    session.execute(
        delete(ReadingRow)
        .where(ReadingRow.document_id == document_id, ReadingRow.job_id.in_(jobs))
        .execution_options(synchronize_session=False)
    )


def _take_out_of_use(session: Session, tenant: str, document_id: str) -> Sequence[SnapshotRow]:
    """Ends readiness, and the right of whoever is just writing to publish."""
    of_document = (SnapshotRow.tenant == tenant, SnapshotRow.document_id == document_id)
    session.execute(
        update(SnapshotRow)
        .where(*of_document)
        .values(state=SnapshotState.REMOVED, fence=SnapshotRow.fence + 1, owner=None, lease_until=None, pinned=False)
        .execution_options(synchronize_session=False)
    )
    return session.scalars(select(SnapshotRow).where(*of_document)).all()


def _drop_chunk_references(session: Session, snapshot_ids: list[int]) -> list[str]:
    """Also those that a reader's lease would keep from the sweep."""
    of_snapshots = SnapshotChunkRow.snapshot_id.in_(snapshot_ids)
    keys = session.scalars(select(SnapshotChunkRow.chunk_key).where(of_snapshots).distinct()).all()
    session.execute(delete(SnapshotChunkRow).where(of_snapshots))
    session.execute(delete(SnapshotLeaseRow).where(SnapshotLeaseRow.snapshot_id.in_(snapshot_ids)))
    return sorted(keys)


def _bury(session: Session, tenant: str, document_id: str | None, counts: Forgotten, now: datetime) -> None:
    session.add(TombstoneRow(tenant=tenant, document_id=document_id, at=now, counts=asdict(counts)))
