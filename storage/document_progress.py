"""How far each document of a job is: pages, tokens, questions. Counts items, so it is for a look now and then."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from storage.progress import require_job
from storage.schema import (
    OPEN_STATES,
    DocumentRow,
    ItemRow,
    ReadingRow,
    SectionRow,
    SnapshotRow,
    SnapshotState,
    SourceRow,
)
from storage.spans import joined


class Span(NamedTuple):
    """Text [start, stop), and the document that it is read as."""

    document_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """A span of a document that is read in one: all of it, or a section.

    `num_tokens` None: no worker has counted them yet. `open_items`: its questions that have not ended.
    """

    span: Span
    num_tokens: int | None
    read_tokens: int
    items: int
    open_items: int

    @property
    def read_span(self) -> tuple[int, int]:
        """The characters that are read."""
        _, start, stop = self.span
        share = self.read_tokens / self.num_tokens if self.num_tokens else 0.0
        return start, start + round((stop - start) * min(1.0, share))


@dataclass(frozen=True)
class DocumentProgress:
    """One file of a job. A page counts as read with the share of its piece's tokens that are; two files with one text
    have the same pieces."""

    position: int
    name: str
    page_starts: tuple[int, ...]
    pieces: tuple[Piece, ...]
    error: str | None

    @property
    def pages(self) -> int:
        return len(self.page_starts)

    @property
    def pages_read(self) -> int:
        stop = max((piece.span.stop for piece in self.pieces), default=0)
        ends = [*self.page_starts[1:], stop]
        return sum(
            max(0, bisect_right(ends, high) - bisect_left(self.page_starts, low))
            for low, high in joined(piece.read_span for piece in self.pieces)
        )

    @property
    def distinct(self) -> list[Piece]:
        """The pieces, equal ones once."""
        return list({piece.span.document_id: piece for piece in self.pieces}.values())

    @property
    def tokens(self) -> int:
        """Those that are counted."""
        return sum(piece.num_tokens or 0 for piece in self.distinct)

    @property
    def tokens_read(self) -> int:
        return sum(piece.read_tokens for piece in self.distinct)

    @property
    def items(self) -> int:
        return sum(piece.items for piece in self.distinct)

    @property
    def items_done(self) -> int:
        return sum(piece.items - piece.open_items for piece in self.distinct)


def document_progress(session: Session, tenant: str, job_id: str) -> list[DocumentProgress]:
    """In the order given.

    Raises:
        JobMissing: this tenant has no such job.
    """
    require_job(session, tenant, job_id)
    sources = session.execute(
        select(SourceRow.position, SourceRow.name, SourceRow.document_id, SourceRow.page_starts, SourceRow.error)
        .where(SourceRow.job_id == job_id)
        .order_by(SourceRow.position)
    ).all()
    spans: dict[str, list[Span]] = {}
    for row in session.scalars(select(SectionRow).where(SectionRow.job_id == job_id).order_by(SectionRow.position)):
        spans.setdefault(row.document_id, []).append(Span(row.section_id, row.start, row.stop))
    lengths = session.execute(
        select(DocumentRow.document_id, DocumentRow.num_chars)
        .join(SourceRow, SourceRow.document_id == DocumentRow.document_id)
        .where(SourceRow.job_id == job_id, DocumentRow.tenant == tenant)
    ).all()
    for document_id, num_chars in lengths:
        spans.setdefault(document_id, [Span(document_id, 0, num_chars)])
    tokens, items = _tokens(session, tenant, job_id), _items(session, job_id)
    return [
        DocumentProgress(
            position=source.position,
            name=source.name,
            page_starts=tuple(source.page_starts),
            pieces=tuple(_piece(span, tokens, items) for span in spans.get(source.document_id, ())),
            error=source.error,
        )
        for source in sources
    ]


def _piece(span: Span, tokens: dict[str, tuple[int, int]], items: dict[str, tuple[int, int]]) -> Piece:
    num_tokens, read_tokens = tokens.get(span.document_id, (None, 0))
    count, still_open = items.get(span.document_id, (0, 0))
    return Piece(span, num_tokens, read_tokens, count, still_open)


def _items(session: Session, job_id: str) -> dict[str, tuple[int, int]]:
    """How many, and how many of them are open, by document."""
    is_open = case((ItemRow.state.in_(OPEN_STATES), 1), else_=0)
    rows = session.execute(
        select(ItemRow.document_id, func.count(), func.sum(is_open))
        .where(ItemRow.job_id == job_id)
        .group_by(ItemRow.document_id)
    ).all()
    return {document_id: (count, int(still_open)) for document_id, count, still_open in rows}


def _tokens(session: Session, tenant: str, job_id: str) -> dict[str, tuple[int, int]]:
    """How many, and how many of them are read, by document: of those that a worker has begun, or found."""
    noted = session.execute(
        select(ReadingRow.document_id, SnapshotRow.num_tokens)
        .join(SnapshotRow, SnapshotRow.snapshot_id == ReadingRow.snapshot_id)
        .where(ReadingRow.job_id == job_id)
    ).all()
    of_job = select(ItemRow.document_id).where(ItemRow.job_id == job_id)
    begun = session.execute(
        select(SnapshotRow.document_id, SnapshotRow.num_tokens, SnapshotRow.done_tokens)
        .where(
            SnapshotRow.tenant == tenant,
            SnapshotRow.state == SnapshotState.WRITING,
            SnapshotRow.document_id.in_(of_job),
        )
        .order_by(SnapshotRow.snapshot_id)
    ).all()
    found = {document_id: (total, done) for document_id, total, done in begun}
    return found | {document_id: (total, total) for document_id, total in noted}
