import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from storage.errors import ObjectMissing, StoreUnusable
from storage.objects.base import ObjectStore, StoredObject

logger = logging.getLogger(__name__)
_SPARED = ("documents/", "manifests/")  # what has to be there beside the chunks
_SLASH = ","  # no key has one
_LONGEST_NAME = 200


class SpareCopies:
    """Another store, with copies of its texts and manifests in a folder of this host, for while it does not answer.

    The store is always asked first, so a copy is never in the way of what is new or gone. Copies are not proved here:
    a manifest has its digest in the database, a text the digest of its tokens in its snapshot's fingerprint. A local
    disk that fails costs copies, never a read or a put. With a budget of 0, copies are only taken away.
    """

    def __init__(self, inner: ObjectStore, folder: Path, budget_bytes: int) -> None:
        self.inner = inner
        self._folder = folder
        self._budget_bytes = budget_bytes

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.inner.put(key, data)
        self._keep(key, data)

    def get(self, key: str) -> bytes:
        try:
            data = self.inner.get(key)
        except ObjectMissing:
            self._drop(key)
            raise
        except StoreUnusable:
            copy = self._read(key)
            if copy is None:
                raise
            return copy
        self._keep(key, data)
        return data

    def delete(self, key: str) -> None:
        try:
            self.inner.delete(key)
        finally:
            self._drop(key)

    def prune(self, known: Callable[[list[str]], set[str]]) -> int:
        """Deletes copies of what is not known any more, then the least recently used above the budget; returns how
        many of the first kind."""
        files: list[Path] = []
        with suppress(OSError):
            files = list(self._folder.iterdir())
        keys = [_key(path.name) for path in files]
        there = known(keys) if keys else set()
        kept, num_gone = [], 0
        for path, key in zip(files, keys, strict=True):
            with suppress(OSError):
                if key in there:
                    kept.append((path.stat().st_mtime, path.stat().st_size, path))
                else:
                    path.unlink(missing_ok=True)
                    num_gone += 1
        left = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if left > self._budget_bytes:
                left -= size
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        return num_gone

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        return self.inner.read_into(key, start, into)

    def has_copy(self, key: str) -> bool:
        return self.inner.has_copy(key)

    def drop_copy(self, key: str) -> bool:
        path = self._path(key)
        had_copy = path is not None and path.exists()
        self._drop(key)
        return self.inner.drop_copy(key) or had_copy

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def keys(self, prefix: str = "") -> Iterator[str]:
        return self.inner.keys(prefix)

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        return self.inner.entries(prefix)

    def sweep(self, older_than_s: float) -> int:
        return self.inner.sweep(older_than_s)

    def describe(self) -> str:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()

    def _keep(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        if path is None or not self._budget_bytes:
            return
        try:
            if path.exists() and path.stat().st_size == memoryview(data).nbytes and path.read_bytes() == data:
                os.utime(path)
                return
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = path.with_name(f".{secrets.token_hex(8)}")
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            partial.replace(path)
        except OSError as exc:
            logger.warning("a text is not copied", extra={"reason": exc.strerror})

    def _read(self, key: str) -> bytes | None:
        path = self._path(key)
        with suppress(OSError):
            return None if path is None else path.read_bytes()
        return None

    def _drop(self, key: str) -> None:
        path = self._path(key)
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path | None:
        name = key.replace("/", _SLASH)
        return self._folder / name if key.startswith(_SPARED) and len(name) <= _LONGEST_NAME else None


def _key(name: str) -> str:
    return name.replace(_SLASH, "/")
