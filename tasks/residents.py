"""The tier in the process's memory: snapshots that were loaded and proved, ready for the next task."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from kernels.kv import PrefixKV

UNSTORED = ""


class ResidentKey(NamedTuple):
    """One publication of a snapshot: written again, it is another."""

    snapshot_id: int
    manifest_sha256: str


def unstored_key(snapshot_id: int) -> ResidentKey:
    """Of KV that was read here and never stored. It is that of the row's fingerprint, whatever is published."""
    return ResidentKey(snapshot_id, UNSTORED)


def is_current(key: ResidentKey, known: Mapping[int, str | None]) -> bool:
    """Whether KV may be kept: its snapshot is known, and that publication of it in use, if it is of one."""
    return key.snapshot_id in known and key.manifest_sha256 in (UNSTORED, known[key.snapshot_id])


class Residents:
    """The most recently used KV, up to a budget in bytes. Shared by the tasks of a process."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._kept: OrderedDict[ResidentKey, PrefixKV] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: ResidentKey) -> PrefixKV | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: ResidentKey, kv: PrefixKV) -> None:
        """Nothing happens where it is larger than the budget."""
        with self._lock:
            if kv.size_bytes <= self.budget_bytes:
                self._make_room(kv.size_bytes)
                self._kept[key] = kv

    def make_room(self, size_bytes: int) -> None:
        """Lets the least recently used go until so much more fits: before it is loaded, not after."""
        with self._lock:
            self._make_room(size_bytes)

    def keys(self) -> list[ResidentKey]:
        with self._lock:
            return list(self._kept)

    def drop(self, keys: list[ResidentKey]) -> None:
        with self._lock:
            for key in keys:
                self._kept.pop(key, None)

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return self._size_bytes()

    def _size_bytes(self) -> int:
        return sum(kv.size_bytes for kv in self._kept.values())

    def _make_room(self, size_bytes: int) -> None:
        while self._kept and self._size_bytes() + size_bytes > self.budget_bytes:
            self._kept.popitem(last=False)
