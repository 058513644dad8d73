"""What is derived from something and kept beside it."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """Makes each thing once, until it is told to forget."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def forget(self) -> None:
        self._made.clear()
