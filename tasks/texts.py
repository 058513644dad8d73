"""The texts of documents that this process works with: from the store, and from memory while that does not answer."""

import threading
from collections import OrderedDict

from storage.documents import get_text
from storage.errors import StoreUnusable
from storage.objects import ObjectStore
from storage.ways import DocumentKey

BUDGET_CHARS = 32_000_000  # as many characters as a hundred long contracts have; small beside their KV


class Texts:
    """Keeps the most recently used, up to a budget. The store is asked first, so that what was erased is not found."""

    def __init__(self, budget_chars: int = BUDGET_CHARS) -> None:
        self._budget_chars = budget_chars
        self._kept: OrderedDict[DocumentKey, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, store: ObjectStore, key: DocumentKey) -> str:
        """
        Raises:
            ObjectMissing: the text is not stored any more.
            StoreUnusable: the store does not answer, and the text is not in memory.
        """
        try:
            text = get_text(store, key.tenant, key.document_id)
        except StoreUnusable:
            with self._lock:
                if key not in self._kept:
                    raise
                return self._kept[key]
        with self._lock:
            self._kept[key] = text
            self._kept.move_to_end(key)
            while sum(map(len, self._kept.values())) > self._budget_chars:
                self._kept.popitem(last=False)
        return text

    def keys(self) -> list[DocumentKey]:
        with self._lock:
            return list(self._kept)

    def drop(self, keys: list[DocumentKey]) -> None:
        with self._lock:
            for key in keys:
                self._kept.pop(key, None)
