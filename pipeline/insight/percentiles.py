"""Spread of a measured quantity."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    count: int
    p50: float
    p95: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread | None:
    """None: there are none."""
    if not values:
        return None
    p50, p95 = np.quantile(np.asarray(values), (0.5, 0.95))
    return Spread(len(values), float(p50), float(p95), float(min(values)), float(max(values)))
