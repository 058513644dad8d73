from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.documents.document import Document, Part, Removed
from pipeline.documents.options import AS_USUAL, ParseLimits, ReadOptions
from pipeline.documents.parser_pool import ask_parser
from pipeline.documents.sources import Source
from pipeline.errors import DocumentError


def read_documents(
    sources: Iterable[Source | Path], *, limits: ParseLimits, workers: int, options: ReadOptions = AS_USUAL
) -> Iterator[tuple[int, Document | DocumentError]]:
    """Index and outcome of each source, in their order; at most `workers` are being read at a time.

    A little is read ahead and no more, so a caller that stores each document holds few of them.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="read-document") as executor:
        ahead: deque[tuple[int, Future[Document]]] = deque()
        try:
            for index, source in enumerate(sources):
                ahead.append((index, executor.submit(read_document, source, limits=limits, options=options)))
                if len(ahead) > 2 * workers:
                    yield _outcome(*ahead.popleft())
            while ahead:
                yield _outcome(*ahead.popleft())
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _outcome(index: int, future: Future[Document]) -> tuple[int, Document | DocumentError]:
    try:
        return index, future.result()
    except DocumentError as exc:
        return index, exc


def read_document(source: Source | Path, *, limits: ParseLimits, options: ReadOptions = AS_USUAL) -> Document:
    """Parsed in a process of its own, as parsers of untrusted files hang, crash and eat memory.

    Raises:
        DocumentError: and nothing else, whatever the file holds.
        OcrNotInstalled: scans are to be recognised.
        ObjectStoreError: the file lies in a bucket that cannot be used.
    """
    if isinstance(source, Path):
        source = Source.at(source)
    with source.opened(limits) as file:
        return _document(ask_parser(source.path, file, limits=limits, options=options, way=source.way))


def _document(answer: dict[str, Any]) -> Document:
    return Document(
        text=answer["text"],
        page_starts=tuple(answer["page_starts"]),
        pages_without_text=tuple(answer["pages_without_text"]),
        kind=answer["kind"],
        parts=tuple(Part(*part) for part in answer["parts"]),
        notes=tuple(answer["notes"]),
        removed=tuple(Removed(*removed) for removed in answer["removed"]),
    )
