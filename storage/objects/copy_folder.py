"""The files of local copies, and the room they may take.

chunks/<name>              a whole copy; the time of its last use is its mtime
.partial/<token>.<name>    a copy that one process is still writing, in its full length from the start
"""

import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PARTIAL_AGE_S = 600.0  # written to by nobody for so long: its process was killed, or its reader gave up
_USE_S = 10.0  # uses closer together are one


class CopyFolder:
    """One process's hand on a folder that other processes of the host use at the same time. Raises OSError.

    A file can vanish at any moment: whoever has it open reads on, for all others it is a miss.
    """

    def __init__(self, root: Path, budget_bytes: int) -> None:
        self._copies = root / "chunks"
        self._partials = root / ".partial"
        # Each process looks at the whole folder only once in a while; a part stays free for what others add meanwhile.
        self._limit = budget_bytes - budget_bytes // 16
        self._unlooked = budget_bytes // 64
        self._allowance = 0
        self._lock = threading.Lock()

    def open_copy(self, name: str) -> int | None:
        """A descriptor to read from, which the caller closes; None where there is no copy."""
        try:
            descriptor = os.open(self._copies / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with suppress(OSError):  # a disk that has become read-only can be read
            if os.fstat(descriptor).st_mtime < time.time() - _USE_S:
                os.utime(descriptor)
        return descriptor

    def has_copy(self, name: str) -> bool:
        return (self._copies / name).exists()

    def begin(self, name: str, size_bytes: int) -> Path | None:
        """A new partial file; None where there is no room for the copy."""
        if not self._has_room(size_bytes):
            return None
        for folder in (self._copies.parent, self._copies, self._partials):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._partials / f"{secrets.token_hex(8)}.{name}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)  # so that others count it whole
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return partial

    def publish(self, partial: Path, name: str) -> None:
        # Not synced: what a power cut makes of it is found by its digest, and read again from the store.
        partial.replace(self._copies / name)

    def remove(self, name: str) -> bool:
        """Removes the copy, and whatever any process has written of a new one. True: there was a copy."""
        for partial in _files(self._partials):
            if partial.name.partition(".")[2] == name:
                Path(partial).unlink(missing_ok=True)
        if not self.has_copy(name):  # asked first: a read-only disk refuses to remove what is not there
            return False
        (self._copies / name).unlink(missing_ok=True)
        return True

    def names(self) -> set[str]:
        """Of all copies, whole and partial."""
        whole = {found.name for found in _files(self._copies)}
        return whole | {found.name.partition(".")[2] for found in _files(self._partials)}

    def size_bytes(self) -> int:
        return sum(size for folder in (self._copies, self._partials) for _, size, _ in _stats(folder))

    def trim(self, limit: int | None = None) -> int:
        """Removes the least recently used copies above the limit, the budget's if none is given; returns what is left
        in bytes, partial files included."""
        limit = self._limit if limit is None else limit
        self.sweep(PARTIAL_AGE_S)
        copies = sorted(_stats(self._copies))
        left = sum(size for _, size, _ in copies) + sum(size for _, size, _ in _stats(self._partials))
        for _, size, path in copies:
            if left <= limit:
                break
            path.unlink(missing_ok=True)
            left -= size
        return left

    def sweep(self, older_than_s: float) -> int:
        """Removes partial files that nobody has written to for this long; returns how many."""
        before = time.time_ns() - int(older_than_s * 1e9)
        old = [path for written_ns, _, path in _stats(self._partials) if written_ns <= before]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)

    def _has_room(self, size_bytes: int) -> bool:
        if size_bytes > self._limit:
            return False
        with self._lock:
            if size_bytes > self._allowance:
                free = self._limit - self.trim(self._limit - size_bytes)
                self._allowance = min(free, max(size_bytes, self._unlooked))
            if size_bytes > self._allowance:
                return False
            self._allowance -= size_bytes
        return True


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from found
    except FileNotFoundError:
        return


def _stats(folder: Path) -> Iterator[tuple[int, int, Path]]:
    for file in _files(folder):
        try:
            found = file.stat()
        except FileNotFoundError:  # gone since it was listed
            continue
        yield found.st_mtime_ns, found.st_size, Path(file)
