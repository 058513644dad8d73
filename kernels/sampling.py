"""Choosing the next token of each answer, so that it does not depend on the others in the batch.

Scores are processed in transformers' order: repetition penalty, tokens that cannot come yet, temperature, top_k, top_p,
min_p. A token is then drawn by the Gumbel-max trick (Maddison et al., arXiv:1411.0030) with one random number for each
token of the vocabulary: of the numbers that differ in the last digit from batch to batch, only a tie of the two highest
could change a draw.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.constraint import Constraint
from kernels.errors import KernelError, NonFiniteLogits
from kernels.params import GenerationParams

FIRST_LOOK = 1024  # of the likeliest tokens, where top_p mostly ends: sorting them all takes ten times as long
LEAST_NOISE = 2.0**-54  # half a step of the random numbers, whose 0 has no logarithm


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities at one place of an answer; `top` has the likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Look(NamedTuple):
    """What each row of logits is seen to have: numbers only, and its best token, which counts if they are."""

    finite: list[bool]
    best: list[int]


class Drawn(NamedTuple):
    token: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Chooses the tokens of one answer. The same seed and question give the same draws in any batch, on any device.

    `ending` are the tokens that end the answer and are no part of it.
    """

    def __init__(
        self,
        params: GenerationParams,
        question_ids: Sequence[int],
        *,
        stop_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> None:
        """`stop_ids` are the model's own ends. The repetition penalty counts the tokens of the question part and of
        the answer, not the document's: an answer quotes it."""
        self.params = params
        self.constraint = constraint
        self.ending = frozenset(params.stop_token_ids)
        if constraint is not None or not params.ignore_eos:
            self.ending |= stop_ids
        self._num_tokens = 0
        self._seen = dict.fromkeys(question_ids)
        digest = hashlib.sha256(repr((params.seed, list(question_ids))).encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def is_complete(self) -> bool:
        """Only the end can follow."""
        return self.constraint is not None and self.constraint.is_complete

    def adjust(self, logits: Tensor) -> bool:
        """What greedy answers need too, in place; `logits` is [vocab]. Whether anything was to be done."""
        if self.params.repetition_penalty != 1:
            penalise(logits, list(self._seen), self.params.repetition_penalty)
        may_end = self._num_tokens >= self.params.min_new_tokens
        if self.constraint is not None:
            self.constraint.mask(logits, may_end=may_end and not self.params.ignore_eos)
        elif not may_end:
            logits[[token for token in self.ending if token < len(logits)]] = float("-inf")
        return self.params.repetition_penalty != 1 or self.constraint is not None or not may_end

    def pick(self, logits: Tensor) -> int:
        """A token drawn from logits [vocab] that were adjusted."""
        scores = warp(logits.cpu().double(), self.params)
        noise = torch.rand(len(scores), generator=self._generator, dtype=torch.float64).clamp_min_(LEAST_NOISE)
        return int(scores.sub_(noise.log_().neg_().log_()).argmax())

    def accept(self, token: int) -> None:
        """
        Raises:
            ConstraintFailed: the answer cannot go on behind it.
        """
        if token in self.ending:
            return
        self._num_tokens += 1
        self._seen[token] = None
        if self.constraint is not None:
            self.constraint.accept(token)


def look_at(logits: Tensor) -> Look:
    """At logits [rows, vocab]."""
    return Look(_finite_rows(logits), _argmax(logits))


@torch.inference_mode()
def draw(
    logits: Tensor, samplers: Sequence[Sampler], look: Callable[[Tensor], Look] = look_at
) -> list[Drawn | KernelError]:
    """The next token of each row of logits [rows, vocab], which are changed; or why there is none."""
    finite, best = look(logits)
    raw = {
        row: _top(logits[row], sampler.params.logprobs)
        for row, sampler in enumerate(samplers)
        if finite[row] and sampler.params.logprobs is not None
    }
    changed = [row for row, sampler in enumerate(samplers) if finite[row] and sampler.adjust(logits[row])]
    if changed:
        best = _argmax(logits)
    drawn: list[Drawn | KernelError] = []
    for row, sampler in enumerate(samplers):
        if not finite[row]:
            drawn.append(NonFiniteLogits())
            continue
        token = best[row] if sampler.is_greedy else sampler.pick(logits[row])
        try:
            sampler.accept(token)
        except KernelError as exc:
            drawn.append(exc)
            continue
        drawn.append(Drawn(token, raw[row].of(token) if row in raw else None))
    return drawn


def penalise(logits: Tensor, seen: list[int], penalty: float) -> None:
    """The repetition penalty of CTRL (Keskar et al., arXiv:1909.05858), in place: of the tokens `seen`, a positive
    score is divided by the penalty and another multiplied."""
    scores = logits[seen]
    logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)


def warp(logits: Tensor, params: GenerationParams) -> Tensor:
    """The scores from which a token is drawn, for a temperature above 0: -inf for all that is cut off.

    Tokens as likely as the last one kept are kept too. The softmax of the result is their distribution.
    """
    scores = logits / params.temperature
    if 0 < params.top_k < len(scores):
        _cut(scores, scores.topk(params.top_k).values[-1])
    if params.top_p < 1:
        _cut(scores, _least_of_top_p(scores, params.top_p))
    if params.min_p > 0:
        _cut(scores, scores.max() + math.log(params.min_p))
    return scores


def _cut(scores: Tensor, least: Tensor) -> None:
    scores.masked_fill_(scores < least, float("-inf"))


def _least_of_top_p(scores: Tensor, top_p: float) -> Tensor:
    """The score of the last of the likeliest tokens that together reach top_p."""
    total = scores.logsumexp(-1)
    values = scores.topk(min(FIRST_LOOK, len(scores))).values
    if float((values - total).exp().sum()) < top_p:
        values = scores.sort(descending=True).values
    probs = (values - total).exp()
    before = probs.cumsum(-1) - probs
    return values[max(1, int((before < top_p).sum())) - 1]


class _Raw(NamedTuple):
    """What the model said before anything was changed."""

    logits: Tensor
    total: float
    top: tuple[tuple[int, float], ...]

    def of(self, token: int) -> TokenLogprobs:
        return TokenLogprobs(token, float(self.logits[token]) - self.total, self.top)


def _top(logits: Tensor, count: int | None) -> _Raw:
    values, tokens = logits.topk(min(count or 0, len(logits)))
    total = float(logits.logsumexp(-1))
    top = zip(tokens.tolist(), (value - total for value in values.tolist()), strict=True)
    return _Raw(logits.clone(), total, tuple(top))


def _finite_rows(logits: Tensor) -> list[bool]:
    """A sum is not finite where a number is not, and takes a twentieth of the time of looking at each."""
    finite = torch.isfinite(logits.sum(-1))
    if not bool(finite.all()):
        finite = torch.isfinite(logits).all(-1)
    found: list[bool] = finite.tolist()
    return found


def _argmax(logits: Tensor) -> list[int]:
    """Of each row. NumPy's is ten times as fast as torch's on a CPU."""
    found: list[int] = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return found
