"""From the bytes of a file to a document. Runs in a process of its own: see `parser_server`."""

from pathlib import PurePath

from pipeline.documents.archive import is_office_file, list_members, read_member
from pipeline.documents.document import Document, RawPages
from pipeline.documents.docx import read_docx
from pipeline.documents.furniture import remove_furniture
from pipeline.documents.joining import join
from pipeline.documents.kinds import kind_of
from pipeline.documents.mail import read_mail
from pipeline.documents.normalise import normalise_pages
from pipeline.documents.options import Normalise, ReadOptions
from pipeline.documents.pdf import read_pdf
from pipeline.documents.text import read_text
from pipeline.documents.web_page import read_html
from pipeline.errors import DocumentError, EmptyDocument, ParseLimitExceeded

_DEEPEST_MAIL = 5


def parse(path: PurePath, data: bytes, options: ReadOptions, *, max_file_bytes: int) -> Document:
    """
    Raises:
        DocumentError: the file cannot be read.
    """
    kind, raw = _Parser(options, max_file_bytes).pages(path, data)
    paged = normalise_pages(raw.pages)
    paged, removed = remove_furniture(paged) if options.normalise is Normalise.FURNITURE else (paged, ())
    if not paged.text:
        raise EmptyDocument(path)
    return Document(
        text=paged.text,
        page_starts=paged.page_starts,
        pages_without_text=raw.pages_without_text,
        kind=kind,
        parts=raw.parts,
        notes=raw.notes,
        removed=removed,
    )


class _Parser:
    def __init__(self, options: ReadOptions, max_file_bytes: int, depth: int = 0) -> None:
        self._options = options
        self._max_file_bytes = max_file_bytes
        self._depth = depth

    def pages(self, path: PurePath, data: bytes) -> tuple[str, RawPages]:
        kind = kind_of(path, data)
        if kind == "zip" and self._depth and not is_office_file(data):
            return kind, self._attached_archive(path, data)
        match kind:
            case "pdf":
                return kind, read_pdf(path, data, self._options)
            case "zip" | "docx":
                return "docx", read_docx(path, data, self._options)
            case "html":
                return kind, read_html(path, data)
            case "mail":
                return kind, read_mail(path, data, self._attachment)
            case _:
                return kind, read_text(path, data)

    def _attachment(self, path: PurePath, data: bytes) -> RawPages:
        if self._depth >= _DEEPEST_MAIL:
            raise ParseLimitExceeded(path, resource="attachments in attachments", limit=_DEEPEST_MAIL, unit="levels")
        _, pages = _Parser(self._options, self._max_file_bytes, self._depth + 1).pages(path, data)
        if not any(page.strip() for page in pages.pages):
            raise EmptyDocument(path)
        return pages

    def _attached_archive(self, path: PurePath, data: bytes) -> RawPages:
        """An archive that belongs to a message is part of its document, not a folder of documents."""

        def read(way: tuple[int, ...], name: str) -> RawPages | DocumentError:
            inner = path / name
            try:
                return self._attachment(inner, read_member(inner, data, way, max_file_bytes=self._max_file_bytes))
            except DocumentError as exc:
                return exc

        members = list_members(path, data, max_file_bytes=self._max_file_bytes)
        parts = ((member.name, member.error or read(member.way, member.name)) for member in members)
        return join(path.name, RawPages([""]), parts, label="File")
