"""Guessing the next tokens of an answer, so that one step can prove several: answers quote their document.

Prompt lookup (A. Saxena, 2023; a special case of speculative decoding, Leviathan et al., arXiv:2211.17192): where the
last tokens of the answer stand in the document, what follows there is guessed. A step takes the guesses along, and each
token is still chosen from the model's own scores, so that answers are those without guessing.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # tokens
MOST_GUESSED = 8  # tokens at once
STEPS_KEPT = 64  # of the step times
FIRST_STEPS = 4  # tokens of a step that may be guesses while nothing is measured
PRIOR_GUESSES, PRIOR_RIGHT = 8.0, 4.0
FORGET = 0.98  # of what is known of the guesses, at each step


class Lookup:
    """A document's tokens, searched."""

    def __init__(self, document_ids: Sequence[int]) -> None:
        self._ids: npt.NDArray[np.int64] = np.asarray(document_ids, dtype=np.int64)

    def guess(self, tail: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may come behind `tail`; none where its last ones stand nowhere in the document."""
        for length in range(min(LONGEST_MATCH, len(tail)), SHORTEST_MATCH - 1, -1):
            starts = len(self._ids) - length
            if starts <= 0:
                continue
            found = np.ones(starts, dtype=bool)
            for offset, token in enumerate(tail[-length:]):
                found &= self._ids[offset : offset + starts] == token
            at = int(found.argmax())
            if found[at]:
                guessed: list[int] = self._ids[at + length : at + length + most].tolist()
                return guessed
        return []


class StepTimes:
    """What a step takes by the number of its tokens, from the last ones: seconds = base + slope * tokens."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEPS_KEPT)

    def note(self, tokens: int, seconds: float) -> None:
        self._steps.append((tokens, seconds))

    def line(self) -> tuple[float, float] | None:
        """Base and slope, both at least 0; None where steps of one size only are known."""
        if len({tokens for tokens, _ in self._steps}) < 2:
            return None
        tokens, seconds = np.array(self._steps).T
        slope = max(0.0, float(np.polyfit(tokens, seconds, 1)[0]))
        return max(0.0, float(np.median(seconds - slope * tokens))), slope


class Drafting:
    """Whether to guess: only where the step time per token is expected to fall.

    With n questions, n tokens are sure; each guess costs `slope` and, if right, saves an n-th of a step. So guesses pay
    where the share of right ones exceeds slope * n / (base + slope * n).
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._guessed, self._right = PRIOR_GUESSES, PRIOR_RIGHT

    def pays(self, questions: int) -> bool:
        line = self._times.line()
        if line is None:
            return questions <= FIRST_STEPS
        base, slope = line
        needed = slope * questions
        return self._right * (base + needed) > self._guessed * needed

    def note(self, guessed: int, right: int) -> None:
        self._guessed = FORGET * self._guessed + guessed
        self._right = FORGET * self._right + right
