from collections.abc import Iterable

from pipeline.documents.document import Part, RawPages
from pipeline.errors import DocumentError


def join(name: str, main: RawPages, others: Iterable[tuple[str, RawPages | DocumentError]], *, label: str) -> RawPages:
    """One document of a file and what belongs to it; each of these begins a page, under a line with its name.

    What could not be read is named in the text too: a reader, and a model, should know that it is missing.
    """
    pages, without_text, notes = list(main.pages), list(main.pages_without_text), list(main.notes)
    parts = list(main.parts) or [Part(name, 1)]
    for other_name, other in others:
        first_page = len(pages) + 1
        parts.append(Part(other_name, first_page))
        if isinstance(other, DocumentError):
            pages.append(f"[{label}: {other_name} (not read: {other.code.replace('_', ' ')})]")
            notes.append(str(other))
            continue
        head, *rest = other.pages
        pages += [f"[{label}: {other_name}]\n\n{head}", *rest]
        without_text += [first_page - 1 + page for page in other.pages_without_text]
        parts += [Part(f"{other_name}/{part.name}", first_page - 1 + part.first_page) for part in other.parts[1:]]
        notes += [f"{other_name}: {note}" for note in other.notes]
    return RawPages(pages, tuple(without_text), tuple(parts), tuple(notes))
