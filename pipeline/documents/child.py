"""The process that runs the parsers, with the arguments PATH KIND MEMORY_BYTES TIME_S.

Answers on standard output with one JSON object, a document's fields or an error's code and details.
"""

import json
import math
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

from pipeline.errors import DocumentError, EmptyDocument, ParseLimitExceeded, UnreadableDocument


def main() -> None:
    path, kind, memory_bytes, time_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    # Whatever a parser prints must not get into the answer.
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    set_limits(memory_bytes=memory_bytes, time_s=time_s)
    with os.fdopen(answer, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(_answer(path, kind, memory_bytes), ensure_ascii=False))


def set_limits(*, memory_bytes: int, time_s: float) -> None:
    """Must come before the parsers are imported, so that what they allocate is counted.

    The parent enforces the time too; the limit here holds when the parent is gone.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    cpu_s = math.ceil(time_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(path: Path, kind: str, memory_bytes: int) -> dict[str, Any]:
    try:
        return _parse(path, kind)
    except DocumentError as exc:
        error = exc
    except MemoryError:
        error = ParseLimitExceeded(path, resource="memory", limit=memory_bytes / 2**20, unit="MiB")
    except Exception as exc:
        # The type and the place, for a bug report; its message may quote the document.
        place = traceback.extract_tb(exc.__traceback__)[-1]
        error = UnreadableDocument(path, reason=f"{type(exc).__name__} in {Path(place.filename).name}:{place.lineno}")
    return {"error": error.code, "details": error.details}


def _parse(path: Path, kind: str) -> dict[str, Any]:
    from pipeline.documents.normalise import normalise_pages

    match kind:
        case "pdf":
            from pipeline.documents.pdf import read_pdf as read
        case "docx":
            from pipeline.documents.docx import read_docx as read
        case _:
            from pipeline.documents.text import read_text as read
    pages, pages_without_text = read(path)
    text, page_starts = normalise_pages(pages)
    if not text:
        raise EmptyDocument(path)
    return {"text": text, "page_starts": page_starts, "pages_without_text": pages_without_text, "kind": kind}


if __name__ == "__main__":
    main()
