import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from storage.breaker import Breaker
from storage.errors import StoreUnusable
from storage.objects.base import ObjectStore, StoredObject

_T = TypeVar("_T")


class GuardedStore:
    """A store behind a circuit breaker: while it is open, every call fails at once with the error that opened it."""

    def __init__(self, store: ObjectStore, breaker: Breaker) -> None:
        self._store = store
        self._breaker = breaker
        self._error: StoreUnusable | None = None

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._call(lambda: self._store.put(key, data))

    def get(self, key: str) -> bytes:
        return self._call(lambda: self._store.get(key))

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        return self._call(lambda: self._store.read_into(key, start, into))

    def has_copy(self, key: str) -> bool:
        return self._store.has_copy(key)

    def drop_copy(self, key: str) -> bool:
        return self._store.drop_copy(key)

    def size(self, key: str) -> int:
        return self._call(lambda: self._store.size(key))

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete(key))

    def keys(self, prefix: str = "") -> Iterator[str]:
        for found in self.entries(prefix):
            yield found.key

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        listing = self._store.entries(prefix)
        while (found := self._call(lambda: next(listing, None))) is not None:
            yield found

    def sweep(self, older_than_s: float) -> int:
        return self._call(lambda: self._store.sweep(older_than_s))

    def describe(self) -> str:
        return self._store.describe()

    def close(self) -> None:
        self._store.close()

    def _call(self, work: Callable[[], _T]) -> _T:
        if not self._breaker.lets_through():
            # A copy: several threads would write their tracebacks into one.
            raise copy.copy(self._error) if self._error is not None else StoreUnusable()
        try:
            found = work()
        except StoreUnusable as exc:
            self._error = exc
            self._breaker.failed()
            raise
        except BaseException:
            self._breaker.succeeded()  # it answered, if not what was hoped for
            raise
        self._breaker.succeeded()
        return found
