import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from storage.errors import ObjectMissing, ObjectStoreError, StoreDenied, StoreFull, StoreUnavailable
from storage.objects.base import StoredObject, check_key, check_prefix, is_key
from storage.objects.files import read_views

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM}
_MAKE_WRITABLE = (
    "Give this user the right to write there, or set PLATEMAKER_STORE_URL or PLATEMAKER_DATA_DIR to another folder."
)
_IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY}


class FolderStore:
    """Objects as files under one folder, which may be a network mount shared by several machines."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._partial = root / ".partial"
        with self._translated():
            self._partial.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: bytes | memoryview) -> None:
        target = self._root / check_key(key)
        partial = self._partial / secrets.token_hex(16)
        with self._translated():
            try:
                _write(partial, data)
                target.parent.mkdir(parents=True, exist_ok=True)
                partial.replace(target)
                for folder in target.parents[: key.count("/") + 1]:
                    _sync_folder(folder)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def get(self, key: str) -> bytes:
        with self._translated(key):
            return (self._root / check_key(key)).read_bytes()

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        with self._translated(key):
            descriptor = os.open(self._root / check_key(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISDIR(found.st_mode):
                    raise ObjectMissing(key)
                read_views(descriptor, start, into)
                return found.st_size
            finally:
                os.close(descriptor)

    def has_copy(self, key: str) -> bool:
        return False

    def drop_copy(self, key: str) -> bool:
        return False

    def size(self, key: str) -> int:
        path = self._root / check_key(key)
        with self._translated(key):
            found = path.stat()
            if stat.S_ISDIR(found.st_mode):
                raise ObjectMissing(key)
        return found.st_size

    def delete(self, key: str) -> None:
        path = self._root / check_key(key)
        with self._translated():
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._check_mounted()
                return
            _sync_folder(path.parent)

    def keys(self, prefix: str = "") -> Iterator[str]:
        start = self._root / check_prefix(prefix).rpartition("/")[0]
        with self._translated():
            self._check_mounted()
            for folder, folders, files in os.walk(start, onerror=_unless_gone):
                folders[:] = filter(is_key, folders)
                for name in filter(is_key, files):
                    key = (Path(folder) / name).relative_to(self._root).as_posix()
                    if key.startswith(prefix):
                        yield key

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        for key in self.keys(prefix):
            with self._translated():
                try:
                    found = (self._root / key).stat()
                except FileNotFoundError:  # deleted since it was listed
                    continue
            yield StoredObject(key, found.st_size, datetime.fromtimestamp(found.st_mtime, UTC))

    def sweep(self, older_than_s: float) -> int:
        num_swept = 0
        with self._translated():
            for partial in self._partial.iterdir():
                try:
                    if partial.stat().st_mtime <= time.time() - older_than_s:
                        partial.unlink()
                        num_swept += 1
                except FileNotFoundError:  # its put ended meanwhile
                    continue
        return num_swept

    def describe(self) -> str:
        return f"folder {self._root}"

    def close(self) -> None:
        pass

    def _check_mounted(self) -> None:
        """Tell an absent store from an empty one."""
        if not self._partial.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder of objects is gone")

    @contextmanager
    def _translated(self, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self._raise(exc, key)

    def _raise(self, exc: OSError, key: str | None) -> NoReturn:
        reason = os.strerror(exc.errno or errno.EIO)
        place = f"Folder {self._root}: {reason}."
        if exc.errno in _FULL:
            advice = "Mount it writable" if exc.errno == errno.EROFS else "Free space"
            other = "set PLATEMAKER_STORE_URL or PLATEMAKER_DATA_DIR to another folder"
            raise StoreFull(f"{place} {advice}, or {other}.") from exc
        if exc.errno in _DENIED:
            raise StoreDenied(f"{place} {_MAKE_WRITABLE}") from exc
        if exc.errno in _IN_THE_WAY | {errno.ENOENT} and key and self._partial.is_dir():
            if (self._root / key).is_file():
                raise StoreUnavailable(f"{place} It came back just now.") from exc
            raise ObjectMissing(key) from exc
        if exc.errno in _IN_THE_WAY:
            raise ObjectStoreError(f"{place} Something else lies where an object or a folder should.") from exc
        raise StoreUnavailable(f"{place} Check that it is there and mounted.") from exc


def _write(path: Path, data: bytes | memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Make renames in this folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
