"""ZIP archives, read in memory: nothing of them is ever unpacked to disk, and their names are only labels."""

import re
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import PurePath, PurePosixPath
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile, ZipInfo

from pipeline.documents.kinds import ZIP_MAGIC
from pipeline.documents.order import natural
from pipeline.errors import DocumentError, EmptyFolder, EncryptedDocument, ParseLimitExceeded, UnreadableDocument

MOST_MEMBERS = 10_000
MOST_UNPACKED_BYTES = 4 * 2**30
MOST_RATIO = 200
LEAST_SUSPECT_BYTES = 2**20
DEEPEST = 3

_OFFICE_PARTS = {"word/document.xml", "xl/workbook.xml", "ppt/presentation.xml", "content.xml", "_rels/.rels"}
_ENCRYPTED = 1
_UTF8_NAME = 0x800
_HOUSEKEEPING = re.compile(r"(^|/)(__MACOSX/|\.|Thumbs\.db$|desktop\.ini$)", re.IGNORECASE)
_DAMAGED = (BadZipFile, EOFError, NotImplementedError, zlib.error, OSError)


class Member(NamedTuple):
    """`way` holds one index for each archive on the way down to it; `error` says why it cannot be read."""

    way: tuple[int, ...]
    name: str
    error: DocumentError | None = None


class _Budget:
    """What an archive and all archives in it may unpack to."""

    def __init__(self) -> None:
        self.members = 0
        self.size_bytes = 0

    def spend(self, path: PurePath, info: ZipInfo) -> None:
        self.members += 1
        self.size_bytes += info.file_size
        if self.members > MOST_MEMBERS:
            raise ParseLimitExceeded(path, resource="files in an archive", limit=MOST_MEMBERS, unit="files")
        if self.size_bytes > MOST_UNPACKED_BYTES:
            limit = MOST_UNPACKED_BYTES / 2**30
            raise ParseLimitExceeded(path, resource="unpacked size", limit=limit, unit="GiB")


def is_office_file(data: bytes) -> bool:
    """Word, Excel and their like are ZIP archives too."""
    try:
        with ZipFile(BytesIO(data)) as archive:
            return bool(_OFFICE_PARTS & set(archive.namelist()))
    except _DAMAGED:
        return False


def list_members(path: PurePath, data: bytes, *, max_file_bytes: int) -> list[Member]:
    """Every file of an archive and of the archives in it, in the natural order of their names.

    Raises:
        DocumentError: the archive itself cannot be read, or unpacks to too much.
    """
    members = list(_members(path, data, (), "", _Budget(), max_file_bytes))
    if not members:
        raise EmptyFolder(path)
    return sorted(members, key=lambda member: natural(member.name))


def _members(
    path: PurePath, data: bytes, way: tuple[int, ...], prefix: str, budget: _Budget, max_file_bytes: int
) -> Iterator[Member]:
    try:
        archive = ZipFile(BytesIO(data))
    except _DAMAGED as exc:
        raise UnreadableDocument(path, reason="it is damaged or not a ZIP archive") from exc
    with archive:
        for index, info in enumerate(archive.infolist()):
            name = _label(info)
            if info.is_dir() or _HOUSEKEEPING.search(name):
                continue
            budget.spend(path, info)
            yield from _member(archive, info, (*way, index), prefix + name, budget, max_file_bytes)


def _member(
    archive: ZipFile, info: ZipInfo, way: tuple[int, ...], name: str, budget: _Budget, max_file_bytes: int
) -> Iterator[Member]:
    inner = PurePosixPath(name)
    try:
        _check(inner, info, max_file_bytes)
        if inner.suffix.lower() != ".zip":
            yield Member(way, name)
            return
        data = _unpack(inner, archive, info)
        if not data.startswith(ZIP_MAGIC) or is_office_file(data):
            yield Member(way, name)
        elif len(way) >= DEEPEST:
            raise ParseLimitExceeded(inner, resource="archives in archives", limit=DEEPEST, unit="levels")
        else:
            yield from _members(inner, data, way, f"{name}/", budget, max_file_bytes)
    except ParseLimitExceeded as exc:
        if exc.resource in ("files in an archive", "unpacked size"):  # of all together
            raise
        yield Member(way, name, exc)
    except DocumentError as exc:
        yield Member(way, name, exc)


def read_member(path: PurePath, data: bytes, way: tuple[int, ...], *, max_file_bytes: int) -> bytes:
    """
    Raises:
        DocumentError: it is encrypted, damaged or too large.
    """
    for index in way:
        try:
            with ZipFile(BytesIO(data)) as archive:
                info = archive.infolist()[index]
                _check(path, info, max_file_bytes)
                data = _unpack(path, archive, info)
        except (*_DAMAGED, IndexError) as exc:
            raise UnreadableDocument(path, reason="its place in the archive is damaged") from exc
    return data


def _check(path: PurePath, info: ZipInfo, max_file_bytes: int) -> None:
    if info.flag_bits & _ENCRYPTED:
        raise EncryptedDocument(path)
    if info.file_size > max_file_bytes:
        raise ParseLimitExceeded(path, resource="file size", limit=max_file_bytes / 2**20, unit="MiB")
    if info.file_size > max(LEAST_SUSPECT_BYTES, MOST_RATIO * info.compress_size):
        raise ParseLimitExceeded(path, resource="compression", limit=MOST_RATIO, unit="times")


def _unpack(path: PurePath, archive: ZipFile, info: ZipInfo) -> bytes:
    try:
        return archive.read(info)
    except (*_DAMAGED, RuntimeError) as exc:
        raise UnreadableDocument(path, reason="its place in the archive is damaged") from exc


def _label(info: ZipInfo) -> str:
    """The name without steps out of the archive; programs for Chinese Windows do not say that theirs is in GBK."""
    name = info.filename
    if not info.flag_bits & _UTF8_NAME:
        raw = name.encode("cp437", errors="replace")
        for encoding in ("utf-8", "gb18030"):
            try:
                name = raw.decode(encoding)
                break
            except UnicodeDecodeError:
                continue
    parts = name.replace("\\", "/").split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "unnamed"
