import threading
from collections.abc import Iterator, Sequence

from storage.errors import StorageError
from storage.objects.base import ObjectStore, StoredObject
from storage.patience import Asking, Patience


class PatientStore:
    """A store that is asked again while it does not answer. Every method of a store may be repeated whole."""

    def __init__(self, store: ObjectStore, patience_s: float, *, stopping: threading.Event | None = None) -> None:
        self._store = store
        self._patience = Patience(patience_s, stopping=stopping)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._patience.call(lambda: self._store.put(key, data))

    def get(self, key: str) -> bytes:
        return self._patience.call(lambda: self._store.get(key))

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        return self._patience.call(lambda: self._store.read_into(key, start, into))

    def has_copy(self, key: str) -> bool:
        return self._store.has_copy(key)

    def drop_copy(self, key: str) -> bool:
        return self._store.drop_copy(key)

    def size(self, key: str) -> int:
        return self._patience.call(lambda: self._store.size(key))

    def delete(self, key: str) -> None:
        self._patience.call(lambda: self._store.delete(key))

    def keys(self, prefix: str = "") -> Iterator[str]:
        for found in self.entries(prefix):
            yield found.key

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        told: set[str] = set()  # a listing that broke off begins anew
        asking = Asking(self._patience)
        while True:
            try:
                for found in self._store.entries(prefix):
                    if found.key not in told:
                        told.add(found.key)
                        yield found
                        asking = Asking(self._patience)
            except StorageError as exc:
                asking.wait_or_raise(exc)
            else:
                self._patience.succeeded()
                return

    def sweep(self, older_than_s: float) -> int:
        return self._patience.call(lambda: self._store.sweep(older_than_s))

    def describe(self) -> str:
        return self._store.describe()

    def close(self) -> None:
        self._store.close()
