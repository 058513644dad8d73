import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from storage.errors import ObjectStoreError
from storage.objects.base import ObjectStore, StoredObject, is_key
from storage.objects.copy_folder import CopyFolder
from storage.objects.files import first_bytes, read_views
from storage.objects.measured import NoteTransfer, note_nothing
from storage.objects.partial_copy import PartialCopy

logger = logging.getLogger(__name__)
_COPIED = "chunks/"  # of these the reader proves every byte; texts and manifests are small, and only in the store
_PAUSE_S = 60.0  # after the local disk has failed
_AT_ONCE = 500
_READS_REMEMBERED = 10_000

_T = TypeVar("_T")


@dataclass
class _Own:
    """What belongs to one process: a child after a fork neither shares its parent's locks nor its partial files."""

    folder: CopyFolder
    lock: threading.Lock = field(default_factory=threading.Lock)
    partials: dict[str, PartialCopy] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)  # from copies
    distrusted: set[str] = field(default_factory=set)  # their copies are bad, until this process has made new ones
    paused_until: float = 0.0


class LocalCopies:
    """Another store, with copies of its chunks in a folder of this host that all its processes share.

    Copies are not proved here: who finds a wrong digest calls `drop_copy` and reads again. A local disk that fails
    costs copies, never a read or a put. With a budget of 0, copies are only taken away.
    """

    def __init__(
        self, inner: ObjectStore, folder: Path, budget_bytes: int, *, note: NoteTransfer = note_nothing
    ) -> None:
        self.inner = inner
        self._note = note
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._processes: dict[int, _Own] = {}

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.inner.put(key, data)
        if _is_copied(key):
            with self._best_effort():
                self._remove(key)
            view = memoryview(data).cast("B")
            self._copy(key, self._partial(key), 0, [view], view.nbytes)

    def get(self, key: str) -> bytes:
        began = time.perf_counter()
        copy = self._from_copy(key, _read_all)
        if copy is not None:
            self._note("copies", "get", len(copy), time.perf_counter() - began)
            return copy
        partial = self._partial(key)
        data = self.inner.get(key)
        self._copy(key, partial, 0, [memoryview(data)], len(data))
        return data

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        views = [view.cast("B") for view in into]

        def read(descriptor: int) -> int:
            read_views(descriptor, start, views)
            return os.fstat(descriptor).st_size

        began = time.perf_counter()
        copy_bytes = self._from_copy(key, read)
        if copy_bytes is not None:
            num_read = min(max(0, copy_bytes - start), sum(view.nbytes for view in views))
            self._note("copies", "get", num_read, time.perf_counter() - began)
            return copy_bytes
        partial = self._partial(key)
        size_bytes = self.inner.read_into(key, start, into)
        self._copy(key, partial, start, first_bytes(views, max(0, size_bytes - start)), size_bytes)
        return size_bytes

    def has_copy(self, key: str) -> bool:
        own = self._own()
        with self._best_effort():
            return _is_copied(key) and key not in own.distrusted and own.folder.has_copy(_name(key))
        return False

    def drop_copy(self, key: str) -> bool:
        if not _is_copied(key):
            return self.inner.drop_copy(key)
        own = self._own()
        with own.lock:
            # Another thread or process may have dropped it a moment ago: what was read was a copy all the same.
            was_read = key in own.read
            own.distrusted.add(key)
        removed = False
        with self._best_effort():
            removed = self._remove(key)
        return self.inner.drop_copy(key) or removed or was_read

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def delete(self, key: str) -> None:
        try:
            self.inner.delete(key)
        finally:
            if _is_copied(key):
                try:
                    self._remove(key)
                except OSError as exc:
                    raise ObjectStoreError(
                        f"The local copy of {key} cannot be deleted: {os.strerror(exc.errno or errno.EIO)}. "
                        f"Make {self._folder} writable and try again, or delete it."
                    ) from exc

    def keys(self, prefix: str = "") -> Iterator[str]:
        return self.inner.keys(prefix)

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        return self.inner.entries(prefix)

    def sweep(self, older_than_s: float) -> int:
        num_swept = 0
        with self._best_effort():
            num_swept = self._own().folder.sweep(older_than_s)
        return self.inner.sweep(older_than_s) + num_swept

    def prune(self, known: Callable[[list[str]], set[str]]) -> int:
        """Delete copies of what is not known any more, whoever deleted it and wherever, then what is over the budget.

        `known` is asked for some hundred keys at a time. Returns how many objects had copies that are now deleted.
        """
        num_pruned = 0
        with self._best_effort():
            own = self._own()
            folder = own.folder
            with own.lock:
                own.partials = {key: partial for key, partial in own.partials.items() if not partial.has_ended}
            keys = [_COPIED + name for name in sorted(folder.names())]
            for start in range(0, len(keys), _AT_ONCE):
                batch = keys[start : start + _AT_ONCE]
                for key in set(batch) - known(batch):
                    self._remove(key)
                    num_pruned += 1
            folder.trim()
        return num_pruned

    def describe(self) -> str:
        taken = "cannot be read"
        with self._best_effort():
            taken = f"{self._own().folder.size_bytes() / 1e6:,.0f} of {self._budget_bytes / 1e6:,.0f} MB"
        return f"{self.inner.describe()}, copies in {self._folder} ({taken})"

    def close(self) -> None:
        own = self._processes.pop(os.getpid(), None)
        if own:
            with self._best_effort():
                for partial in list(own.partials.values()):
                    partial.give_up()
        self.inner.close()

    def _own(self) -> _Own:
        pid = os.getpid()
        found = self._processes.get(pid)
        if found is None:
            found = self._processes.setdefault(pid, _Own(CopyFolder(self._folder, self._budget_bytes)))
        return found

    def _from_copy(self, key: str, read: Callable[[int], _T]) -> _T | None:
        """What `read` makes of a descriptor of the copy; None if there is none, or the disk fails."""
        own = self._own()
        if not _is_copied(key) or key in own.distrusted:
            return None
        with self._best_effort():
            descriptor = own.folder.open_copy(_name(key))
            if descriptor is None:
                return None
            try:
                self._give_up(key)  # another process was faster
                with own.lock:
                    if len(own.read) >= _READS_REMEMBERED:
                        own.read.clear()
                    own.read.add(key)
                return read(descriptor)
            except OSError:
                own.distrusted.add(key)
                raise
            finally:
                os.close(descriptor)
        return None

    def _partial(self, key: str) -> PartialCopy | None:
        """To be asked for before the object is read: what is deleted while it is read is then not copied."""
        own = self._own()
        if not _is_copied(key) or not self._budget_bytes or time.monotonic() < own.paused_until:
            return None
        with own.lock:
            found = own.partials.get(key)
            stale = found if found and found.has_ended else None
            if found is None or stale:
                found = own.partials[key] = PartialCopy(own.folder, _name(key))
        if stale:
            with self._best_effort():
                stale.give_up()
        return found

    def _copy(self, key: str, partial: PartialCopy | None, start: int, views: list[memoryview], size: int) -> None:
        if partial is None:
            return
        own = self._own()
        with self._best_effort():
            if key not in own.distrusted and own.folder.has_copy(_name(key)):  # made since it was looked for
                partial.give_up()
            elif any(views) and partial.write(start, views, size):
                own.distrusted.discard(key)
        if partial.has_ended:
            with own.lock:
                if own.partials.get(key) is partial:
                    del own.partials[key]

    def _give_up(self, key: str) -> None:
        own = self._own()
        with own.lock:
            partial = own.partials.pop(key, None)
        if partial is not None:
            partial.give_up()

    def _remove(self, key: str) -> bool:
        own = self._own()
        try:
            self._give_up(key)
            return own.folder.remove(_name(key))
        except OSError:
            own.distrusted.add(key)
            raise

    @contextmanager
    def _best_effort(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self._pause(os.strerror(exc.errno or errno.EIO))

    def _pause(self, reason: str) -> None:
        """Half-written copies would lack what is read meanwhile, so they are given up."""
        own = self._own()
        with own.lock:
            is_paused = time.monotonic() < own.paused_until
            own.paused_until = time.monotonic() + _PAUSE_S
            given_up, own.partials = list(own.partials.values()), {}
        if not is_paused:
            logger.warning("local copies fail, going on without", extra={"reason": reason})
        for partial in given_up:
            with suppress(OSError):
                partial.give_up()


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def _is_copied(key: str) -> bool:
    return key.startswith(_COPIED) and "/" not in _name(key) and is_key(key)


def _name(key: str) -> str:
    return key.removeprefix(_COPIED)
