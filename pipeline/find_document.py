"""Which document a person means: by a file that lies here, by the name it was submitted under, or by its id."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.documents import Document, read_documents
from pipeline.errors import AmbiguousDocument
from pipeline.settings import PipelineSettings
from storage.catalog import documents_called
from storage.database import Database
from storage.errors import DocumentUnknown


@dataclass(frozen=True)
class Meant:
    """`text` is there where the file itself was read."""

    document_id: str
    text: str | None = None


def find_document(database: Database, settings: PipelineSettings, name: str) -> Meant:
    """A name that was submitted wins over the file: the file may have changed since.

    Raises:
        DocumentUnknown: nothing is called so.
        AmbiguousDocument: several are.
        DocumentError: there is such a file, but it cannot be read.
    """
    with database.reading() as session:
        found = documents_called(session, settings.tenant, name)
    if len(found) > 1:
        raise AmbiguousDocument(name, found)
    if found:
        return Meant(found[0])
    path = Path(name)
    if not path.is_file():
        raise DocumentUnknown(name)
    _, outcome = next(iter(read_documents([path], limits=settings.parse_limits, workers=1)))
    if not isinstance(outcome, Document):
        raise outcome
    return Meant(outcome.document_id, outcome.text)
