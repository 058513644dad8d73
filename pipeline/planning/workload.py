"""What a night asks: documents by length, and how many questions of each."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PlanError

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """`tokens[document]`; every document is asked the same questions."""

    tokens: Numbers
    questions: int
    question_tokens: float = 24.0
    output_tokens: float = 48.0

    @property
    def documents(self) -> int:
        return len(self.tokens)

    @property
    def answers(self) -> int:
        return self.documents * self.questions


def draw_lengths(lengths: Sequence[float], weights: Sequence[float] | None, documents: int) -> Numbers:
    """As many lengths as documents, in the shares of the histogram, evenly mixed and the same each time: with each
    length stands its share, to within one document."""
    shares = np.full(len(lengths), 1.0) if weights is None else np.asarray(weights, dtype=np.float64)
    edges = np.round(np.cumsum(shares / shares.sum()) * documents).astype(np.int64)
    drawn = np.repeat(np.asarray(lengths, dtype=np.float64), np.diff(edges, prepend=0))
    stride = _coprime(documents)
    return drawn[(np.arange(documents) * stride) % documents] if documents else drawn


def _coprime(count: int) -> int:
    """A step that visits each of `count` places once, far from the last."""
    step = max(1, int(count * 0.6180339887))
    while np.gcd(step, max(count, 1)) != 1:
        step += 1
    return step


def read_histogram(path: Path) -> tuple[list[float], list[float]]:
    """Lengths and counts of a CSV with the columns `tokens` and `documents`.

    Raises:
        PlanError: it has other columns, or no document.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(float(row["tokens"]), float(row["documents"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as exc:
        raise PlanError(f"{path} cannot be read as a histogram: it needs the columns tokens and documents") from exc
    if any(tokens <= 0 or count < 0 for tokens, count in rows) or not sum(count for _, count in rows):
        raise PlanError(f"{path} holds no documents; give positive tokens and counts")
    return [tokens for tokens, _ in rows], [count for _, count in rows]
