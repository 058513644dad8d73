import threading
import time
from collections.abc import Sequence
from typing import Protocol

from storage.objects.base import ObjectStore
from storage.objects.patient import PatientStore


class NoteTransfer(Protocol):
    """Told of every put and get that succeeded."""

    def __call__(self, tier: str, operation: str, size_bytes: int, seconds: float) -> None: ...


def note_nothing(tier: str, operation: str, size_bytes: int, seconds: float) -> None:
    """For who keeps no figures."""


class MeasuredStore(PatientStore):
    """A patient store that says how much it moved and how long that took, asking again included."""

    def __init__(
        self,
        store: ObjectStore,
        patience_s: float,
        *,
        tier: str,
        note: NoteTransfer,
        stopping: threading.Event | None = None,
    ) -> None:
        super().__init__(store, patience_s, stopping=stopping)
        self._tier = tier
        self._note = note

    def put(self, key: str, data: bytes | memoryview) -> None:
        began = time.perf_counter()
        super().put(key, data)
        self._note(self._tier, "put", memoryview(data).nbytes, time.perf_counter() - began)

    def get(self, key: str) -> bytes:
        began = time.perf_counter()
        data = super().get(key)
        self._note(self._tier, "get", len(data), time.perf_counter() - began)
        return data

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        began = time.perf_counter()
        size_bytes = super().read_into(key, start, into)
        read = min(max(0, size_bytes - start), sum(view.nbytes for view in into))
        self._note(self._tier, "get", read, time.perf_counter() - began)
        return size_bytes
