"""What a person points at (files, folders, patterns, archives, buckets) as a list of files to read."""

import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO, Protocol

from pipeline.documents.kinds import ZIP_MAGIC
from pipeline.documents.options import ParseLimits
from pipeline.documents.order import natural
from pipeline.documents.parser_pool import ask_parser, error_of
from pipeline.errors import (
    DocumentError,
    EmptyDocument,
    EmptyFolder,
    MissingFile,
    ParseLimitExceeded,
    UnreadableDocument,
    UnsupportedType,
)
from storage.errors import ObjectMissing

if TYPE_CHECKING:
    from storage.objects import Bucket

_BUCKET = re.compile(r"s3://([a-z0-9][a-z0-9.-]+[a-z0-9])(?:/(.*))?", re.DOTALL)
_PATTERN = re.compile(r"[*?\[]")
_OFFICE_SUFFIXES = {".docx", ".docm", ".dotx", ".xlsx", ".pptx", ".odt"}


OpenBucket = Callable[[str], "Bucket"]


class _Place(Protocol):
    def opened(self, path: PurePath, limits: ParseLimits) -> BinaryIO:
        """The file, to be closed. Raises: DocumentError, OSError, ObjectStoreError."""


@dataclass(frozen=True)
class _OnDisk:
    path: Path

    def opened(self, path: PurePath, limits: ParseLimits) -> BinaryIO:
        if self.path.is_dir():
            raise UnsupportedType(path, found="a folder")
        size_bytes = self.path.stat().st_size
        if not self.path.is_file():
            raise UnsupportedType(path, found="not an ordinary file")
        _check_size(path, size_bytes, limits)
        return self.path.open("rb")


@dataclass(frozen=True)
class _InBucket:
    bucket: "Bucket"
    key: str
    size_bytes: int

    def opened(self, path: PurePath, limits: ParseLimits) -> BinaryIO:
        _check_size(path, self.size_bytes, limits)
        try:
            data = self.bucket.get(self.key)
        except ObjectMissing as exc:
            raise MissingFile(path) from exc
        file = tempfile.TemporaryFile()  # noqa: SIM115 # the caller closes it, and with that it is gone
        file.write(data)
        file.flush()
        return file


class _Fetched:
    """An archive from a bucket, kept while one of its files is still to be read."""

    def __init__(self, file: int) -> None:
        self._file = os.dup(file)
        weakref.finalize(self, os.close, self._file)

    def opened(self, path: PurePath, limits: ParseLimits) -> BinaryIO:
        return os.fdopen(os.dup(self._file), "rb")


@dataclass(frozen=True)
class Source:
    """A file to read. `way` leads into the archive at `place`; `error` says why there is nothing to read."""

    name: str
    place: _Place = field(repr=False)
    way: tuple[int, ...] = ()
    error: DocumentError | None = None

    @classmethod
    def at(cls, path: Path) -> "Source":
        return cls(str(path), _OnDisk(path))

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> PurePath:
        """As errors name it; an object in a bucket and a file in an archive have no path of their own."""
        return self.place.path if isinstance(self.place, _OnDisk) and not self.way else PurePath(self.name)

    @contextmanager
    def opened(self, limits: ParseLimits) -> Iterator[int]:
        """The descriptor of the file, or of the archive that holds it.

        Raises:
            DocumentError: there is none, or it is empty or too large.
            ObjectStoreError: the bucket it lies in cannot be used.
        """
        if self.error:
            raise self.error
        try:
            file = self.place.opened(self.path, limits)
        except (FileNotFoundError, NotADirectoryError, ValueError) as exc:  # ValueError: no file can have this name
            raise MissingFile(self.path) from exc
        except OSError as exc:
            raise UnreadableDocument(self.path, reason=exc.strerror or type(exc).__name__) from exc
        with file:
            yield file.fileno()


def find_sources(named: Iterable[str | Path], *, limits: ParseLimits, open_bucket: OpenBucket) -> list[Source]:
    """Every file that is meant, in the order named; within a folder, pattern, archive or bucket in natural order.

    What is not there or empty is a source with its error, so that it gets its row. Hidden files are left out.
    `open_bucket` is given the name of a bucket.
    """
    return [source for name in named for found in _named(str(name), open_bucket) for source in _unpacked(found, limits)]


def _named(name: str, open_bucket: OpenBucket) -> Iterator[Source]:
    if name.startswith("s3://"):
        yield from _in_bucket(name, open_bucket)
        return
    path = Path(name)
    try:
        is_folder, exists = path.is_dir(), os.path.lexists(path)
    except ValueError:
        is_folder, exists = False, True
    if is_folder:
        yield from _in_folder(path)
    elif exists or not _PATTERN.search(name):
        yield Source.at(path)
    else:
        matches = sorted(glob(name, recursive=True), key=natural)  # noqa: PTH207 # a Path takes no absolute pattern
        files = [found for match in matches for found in _match(Path(match), recursive="**" in name)]
        yield from files or [_missing(name, MissingFile(path))]


def _match(path: Path, *, recursive: bool) -> Iterator[Source]:
    if path.is_dir():
        if not recursive:  # `**` has named its files already
            yield from _in_folder(path)
    else:
        yield Source.at(path)


def _in_folder(folder: Path) -> Iterator[Source]:
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        found += [Path(parent, file) for file in files if not _is_hidden(file)]
    if not found:
        yield _missing(str(folder), EmptyFolder(folder))
    for path in sorted(found, key=lambda path: natural(str(path))):
        yield Source.at(path)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "~$", "__MACOSX")) or name in ("Thumbs.db", "desktop.ini")


def _in_bucket(name: str, open_bucket: OpenBucket) -> Iterator[Source]:
    match = _BUCKET.fullmatch(name)
    if match is None:
        yield _missing(name, MissingFile(PurePath(name)))
        return
    bucket, prefix = open_bucket(match[1]), match[2] or ""
    # A prefix is a folder or an object, as a path is: `deals` does not mean `deals-old/`.
    entries = [
        (key, size_bytes)
        for key, size_bytes in bucket.listing(prefix)
        if not key.endswith("/")
        and (key == prefix or not prefix or prefix.endswith("/") or key.startswith(f"{prefix}/"))
        and not any(map(_is_hidden, key.removeprefix(prefix).split("/")))
    ]
    if not entries:
        yield _missing(name, EmptyFolder(PurePath(name)))
    for key, size_bytes in sorted(entries, key=lambda entry: natural(entry[0])):
        yield Source(f"s3://{match[1]}/{key}", _InBucket(bucket, key, size_bytes))


def _unpacked(source: Source, limits: ParseLimits) -> Iterator[Source]:
    """The files in an archive; any other source as it is."""
    if source.error or source.path.suffix.lower() in _OFFICE_SUFFIXES:
        yield source
        return
    if isinstance(source.place, _InBucket) and source.path.suffix.lower() != ".zip":
        yield source  # not fetched twice to look at its first bytes
        return
    try:
        with source.opened(limits) as file:
            if os.pread(file, 4, 0) not in ZIP_MAGIC:
                yield source
                return
            members = ask_parser(source.path, file, limits=limits, listing=True)["members"]
            place = _Fetched(file) if isinstance(source.place, _InBucket) else source.place
    except DocumentError as exc:
        yield Source(source.name, source.place, error=exc)
        return
    if members is None:  # a Word file by another name
        yield source
        return
    for way, name, error in members:
        whole = f"{source.name}/{name}"
        yield Source(whole, place, tuple(way), error_of(PurePath(whole), error) if error else None)


def _missing(name: str, error: DocumentError) -> Source:
    return Source(name, _OnDisk(Path(name)), error=error)


def _check_size(path: PurePath, size_bytes: int, limits: ParseLimits) -> None:
    if size_bytes == 0:
        raise EmptyDocument(path)
    if size_bytes > limits.max_file_bytes:
        raise ParseLimitExceeded(path, resource="file size", limit=limits.max_file_bytes / 2**20, unit="MiB")
