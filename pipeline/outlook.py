"""How far a job is, with what is left of it in seconds, at the rates measured on its database."""

from dataclasses import dataclass
from typing import Any

from pipeline.counting import CHARS_PER_TOKEN
from pipeline.words import duration
from storage.database import Database
from storage.document_progress import DocumentProgress, Piece, document_progress
from storage.progress import require_job
from storage.rates import measured_rates, ready_documents


@dataclass(frozen=True)
class Outlook:
    """`tokens` are estimated where no worker has counted them yet. `seconds_left` is this job's own work, one document
    after the other; None: no work of its model was measured yet."""

    documents: tuple[DocumentProgress, ...]
    tokens: int
    seconds_left: float | None

    @property
    def pages(self) -> int:
        return sum(document.pages for document in self.documents)

    @property
    def pages_read(self) -> int:
        return sum(document.pages_read for document in self.documents)

    @property
    def tokens_read(self) -> int:
        return sum(piece.read_tokens for piece in _pieces(self.documents))

    @property
    def items(self) -> int:
        return sum(piece.items for piece in _pieces(self.documents))

    @property
    def items_done(self) -> int:
        return sum(piece.items - piece.open_items for piece in _pieces(self.documents))

    @property
    def sentence(self) -> str:
        left = ""
        if self.items_done < self.items:
            left = "; time left unknown: no work of this model was measured here yet"
            if self.seconds_left is not None:
                left = f"; about {duration(self.seconds_left)} left"
        return (
            f"{self.pages_read:,} of {self.pages:,} pages and {self.tokens_read:,} of {self.tokens:,} tokens read, "
            f"{self.items_done:,} of {self.items:,} questions done{left}"
        )

    def record(self) -> dict[str, Any]:
        names = ("pages", "pages_read", "tokens", "tokens_read", "items", "items_done")
        seconds = None if self.seconds_left is None else round(self.seconds_left, 1)
        return {**{name: getattr(self, name) for name in names}, "seconds_left": seconds}


def document_record(document: DocumentProgress) -> dict[str, Any]:
    names = ("pages", "pages_read", "tokens", "tokens_read", "items", "items_done", "error")
    sections = len(document.pieces) if len(document.pieces) > 1 else 0
    return {"document": document.name, "sections": sections, **{name: getattr(document, name) for name in names}}


def outlook(database: Database, tenant: str, job_id: str) -> Outlook:
    """
    Raises:
        JobMissing: this tenant has no such job.
    """
    with database.reading() as session:
        model = require_job(session, tenant, job_id).model
        documents = tuple(document_progress(session, tenant, job_id))
        rates = measured_rates(session, tenant, model)
        pieces = _pieces(documents)
        uncounted = [piece.span.document_id for piece in pieces if piece.open_items and piece.num_tokens is None]
        ready = ready_documents(session, tenant, model, uncounted)
    counted = [piece for piece in pieces if piece.num_tokens]
    chars = sum(piece.span.stop - piece.span.start for piece in counted)
    a_char = sum(piece.num_tokens or 0 for piece in counted) / chars if chars else 1 / CHARS_PER_TOKEN
    tokens = {piece.span.document_id: _tokens(piece, a_char) for piece in pieces}
    to_read = sum(
        tokens[piece.span.document_id] - piece.read_tokens
        for piece in pieces
        if piece.open_items and piece.span.document_id not in ready
    )
    seconds = rates.seconds(to_read, sum(piece.open_items for piece in pieces))
    return Outlook(documents, sum(tokens.values()), seconds)


def _pieces(documents: tuple[DocumentProgress, ...]) -> list[Piece]:
    """Each once."""
    return list({piece.span.document_id: piece for document in documents for piece in document.pieces}.values())


def _tokens(piece: Piece, a_char: float) -> int:
    return round((piece.span.stop - piece.span.start) * a_char) if piece.num_tokens is None else piece.num_tokens
