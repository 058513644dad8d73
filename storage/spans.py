"""Spans of numbers: places in a text, or moments."""

from collections.abc import Iterable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def joined(spans: Iterable[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """Those that touch or overlap as one, in order."""
    found: list[tuple[Number, Number]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found
