import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from storage.objects.copy_folder import PARTIAL_AGE_S, CopyFolder
from storage.objects.files import write_views


class PartialCopy:
    """An object's copy while threads of this process read its parts and write them here, in any order.

    It has ended when it is whole and published, or given up.
    """

    def __init__(self, folder: CopyFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._size_bytes = 0
        self._written: list[tuple[int, int]] = []  # apart from each other, in order
        self._used_at = time.monotonic()
        self._is_over = False

    @property
    def has_ended(self) -> bool:
        """Also when nobody has written for so long that others may have swept the file."""
        return self._is_over or time.monotonic() - self._used_at > PARTIAL_AGE_S / 2

    def write(self, start: int, views: Sequence[memoryview], size_bytes: int) -> bool:
        """Take the bytes from `start` on of an object of this size. True: with these it became the copy.

        Raises: OSError.
        """
        try:
            path = self._begun(size_bytes)
            if path is None:
                return False
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                write_views(descriptor, start, views)
            finally:
                os.close(descriptor)
            return self._note(path, start, start + sum(view.nbytes for view in views))
        except FileNotFoundError:  # swept, or deleted with the object
            self.give_up()
            return False
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """What is still being read of the object does not become a copy. Raises: OSError."""
        with self._lock:
            self._is_over = True
            path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)

    def _begun(self, size_bytes: int) -> Path | None:
        with self._lock:
            self._used_at = time.monotonic()
            if not self._is_over and self._path is None:
                self._path, self._size_bytes = self._folder.begin(self._name, size_bytes), size_bytes
                self._is_over = self._path is None
            path, is_replaced = self._path, size_bytes != self._size_bytes
        if is_replaced:
            self.give_up()
            return None
        return path

    def _note(self, path: Path, start: int, stop: int) -> bool:
        with self._lock:
            if self._is_over:
                return False
            self._written = _joined([*self._written, (start, stop)])
            if self._written != [(0, self._size_bytes)]:
                return False
            self._folder.publish(path, self._name)
            self._is_over, self._path = True, None
            return True


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found
