"""Documents: the normalised text as an object, its row in the database."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from storage.errors import DocumentUnknown
from storage.inserting import insert_new
from storage.objects import ObjectStore
from storage.schema import DocumentRow
from storage.ways import DocumentKey


def text_key(tenant: str, document_id: str) -> str:
    return f"documents/{tenant}/{document_id}.txt"


def put_text(store: ObjectStore, tenant: str, document_id: str, text: str) -> None:
    """Stores the text; before its row, so that a row always has its text. Idempotent."""
    store.put(text_key(tenant, document_id), text.encode())


def get_text(store: ObjectStore, tenant: str, document_id: str) -> str:
    return store.get(text_key(tenant, document_id)).decode()


def add_documents(session: Session, tenant: str, num_chars: dict[str, int], now: datetime) -> None:
    """Writes the rows of documents, by their ids, unless they are there."""
    # Sorted, so that two submissions of the same documents never wait for each other's rows.
    rows = [
        {
            "tenant": tenant,
            "document_id": document_id,
            "text_key": text_key(tenant, document_id),
            "num_chars": count,
            "created_at": now,
        }
        for document_id, count in sorted(num_chars.items())
    ]
    insert_new(session, DocumentRow, rows)


def known_documents(session: Session, keys: Collection[DocumentKey]) -> set[DocumentKey]:
    """Those of the documents that have a row."""
    columns = (DocumentRow.tenant, DocumentRow.document_id)
    return {DocumentKey(*row) for row in session.execute(select(*columns).where(tuple_(*columns).in_(list(keys))))}


def require_document(session: Session, tenant: str, document_id: str) -> DocumentRow:
    """
    Raises:
        DocumentUnknown: this tenant has no such document.
    """
    row = session.scalar(select(DocumentRow).filter_by(tenant=tenant, document_id=document_id))
    if row is None:
        raise DocumentUnknown(document_id)
    return row
