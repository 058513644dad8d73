import json
import math
import mmap
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.documents.document import Document
from pipeline.errors import (
    DOCUMENT_ERRORS,
    DocumentError,
    EmptyDocument,
    EncryptedDocument,
    MissingFile,
    ParseLimitExceeded,
    UnreadableDocument,
    UnsupportedType,
)

# -P: a module of the same name in the folder where the user stands is not ours.
CHILD_COMMAND = (sys.executable, "-P", "-m", "pipeline.documents.child")

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_KEPT_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH", "TMPDIR")

_KIND_BY_SUFFIX = {".pdf": "pdf", ".docx": "docx", ".txt": "text", ".text": "text", ".md": "text"}
_KIND_BY_MAGIC = {b"%PDF-": "pdf", b"PK\x03\x04": "docx", b"PK\x05\x06": "docx"}
_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_OTHER_MAGIC = {
    b"{\\rtf": "a Rich Text file (.rtf)",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"II*\0": "an image",
    b"MM\0*": "an image",
}


@dataclass(frozen=True)
class ParseLimits:
    """What one document may cost; time and memory are those of the process that parses it."""

    time_s: float = 60
    memory_bytes: int = 2 * 2**30
    max_file_bytes: int = 200 * 2**20


def read_documents(
    paths: Iterable[Path], *, limits: ParseLimits, workers: int
) -> Iterator[tuple[int, Document | DocumentError]]:
    """Index and outcome of each path, in their order; at most `workers` are being read at a time.

    A little is read ahead and no more, so a caller that stores each document holds few of them.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="read-document") as executor:
        ahead: deque[tuple[int, Future[Document]]] = deque()
        try:
            for index, path in enumerate(paths):
                ahead.append((index, executor.submit(read_document, path, limits=limits)))
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


def read_document(path: Path, *, limits: ParseLimits) -> Document:
    """Parsed in a process of its own, as parsers of untrusted files hang, crash and eat memory.

    Raises: DocumentError, and nothing else whatever the file holds.
    """
    try:
        kind = _kind(path, limits)
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
    ) as exc:  # ValueError: no file can have this name
        raise MissingFile(path) from exc
    except OSError as exc:
        raise UnreadableDocument(path, reason=exc.strerror or type(exc).__name__) from exc
    return _parse_in_child(path, kind, limits)


def _kind(path: Path, limits: ParseLimits) -> str:
    """By what the file begins with; its name decides only where that says nothing."""
    if path.is_dir():
        raise UnsupportedType(path, found="a folder")
    size_bytes = path.stat().st_size
    if not path.is_file():
        raise UnsupportedType(path, found="not an ordinary file")
    if size_bytes == 0:
        raise EmptyDocument(path)
    if size_bytes > limits.max_file_bytes:
        raise ParseLimitExceeded(path, resource="file size", limit=limits.max_file_bytes / 2**20, unit="MiB")
    with path.open("rb") as file:
        head = file.read(1024)
        if head.startswith(_OLE_MAGIC):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                raise _ole_error(path, content)
    for magic, found in _OTHER_MAGIC.items():
        if head.startswith(magic):
            raise UnsupportedType(path, found=found)
    for magic, kind in _KIND_BY_MAGIC.items():
        if head.lstrip(b"\xef\xbb\xbf\t\n\r ").startswith(magic):
            return kind
    suffix = path.suffix.lower()
    if suffix not in _KIND_BY_SUFFIX:
        raise UnsupportedType(path, found=f"a file of type {suffix}" if suffix else "a file without a type")
    return _KIND_BY_SUFFIX[suffix]


def _ole_error(path: Path, content: mmap.mmap) -> DocumentError:
    """Microsoft's container of before 2007, which also wraps encrypted files of after."""
    if content.find("EncryptedPackage".encode("utf-16-le")) >= 0:
        return EncryptedDocument(path)
    if content.find("WordDocument".encode("utf-16-le")) >= 0 or path.suffix.lower() == ".doc":
        return UnsupportedType(path, found="an old Word file (.doc)", save_as=".docx or PDF")
    if path.suffix.lower() == ".docx":
        return EncryptedDocument(path)
    return UnsupportedType(path, found="an old Microsoft Office file")


def _parse_in_child(path: Path, kind: str, limits: ParseLimits) -> Document:
    command = [*CHILD_COMMAND, str(path), kind, str(limits.memory_bytes), str(limits.time_s)]
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_child_environment(),
            timeout=limits.time_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise _over_time(path, limits) from exc
    if child.returncode != 0:
        raise _death(path, child.returncode, limits)
    try:
        answer = json.loads(child.stdout)
    except ValueError as exc:
        raise UnreadableDocument(path, reason="the parser gave no answer") from exc
    if "error" in answer:
        raise DOCUMENT_ERRORS[answer["error"]](path, **answer["details"])
    return Document(
        text=answer["text"],
        page_starts=tuple(answer["page_starts"]),
        pages_without_text=tuple(answer["pages_without_text"]),
        kind=answer["kind"],
    )


def _child_environment() -> dict[str, str]:
    """Nothing of ours but the way to the packages: a child that reads strangers' files needs no passwords."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    python_path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": python_path, "PYTHONUTF8": "1"}


def _death(path: Path, returncode: int, limits: ParseLimits) -> DocumentError:
    if returncode == -signal.SIGXCPU:
        return _over_time(path, limits)
    if returncode == -signal.SIGKILL:  # the kernel's answer where memory runs out
        return ParseLimitExceeded(path, resource="memory", limit=limits.memory_bytes / 2**20, unit="MiB")
    if returncode < 0:
        return UnreadableDocument(path, reason=f"the parser crashed with {signal.Signals(-returncode).name}")
    return UnreadableDocument(path, reason=f"the parser stopped with status {returncode}")


def _over_time(path: Path, limits: ParseLimits) -> ParseLimitExceeded:
    return ParseLimitExceeded(path, resource="time", limit=math.ceil(limits.time_s), unit="s")
