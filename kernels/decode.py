"""Answering many questions of one document at once, all against one copy of its KV."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kernels.errors import BatchTooLarge, ContextExceeded, KernelError
from kernels.kv import PrefixKV
from kernels.model import LanguageModel
from kernels.out_of_memory import is_out_of_memory
from kernels.params import GenerationParams
from kernels.prompt import Prompter
from kernels.sampling import Sampler, TokenLogprobs, draw

ADMIT_TOKENS = 512  # question tokens taken up in one step; more would hold up the answers under way


@dataclass(frozen=True)
class DecodeRequest:
    """A question of the document; `key` is the caller's name for it."""

    key: int
    question_ids: list[int]
    params: GenerationParams


@dataclass(frozen=True)
class DecodeResult:
    """A finished answer, or the error that ended it. Times are seconds from the question's start in the batch."""

    key: int
    text: str
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length", "cancelled", "error"]
    question_tokens: int
    first_token_s: float
    total_s: float
    error: KernelError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token, where the request wants them


@dataclass
class _Running:
    request: DecodeRequest
    sampler: Sampler
    started: float
    pending: list[int]
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_token_s: float = 0.0


class Decoder:
    """Continuous batching over one document: a question that is done makes room for the next at once.

    Slot i of the suffix KV belongs to running question i; when one ends, the last takes its place, states included.
    """

    def __init__(self, model: LanguageModel, prompter: Prompter, prefix: PrefixKV, *, max_batch: int) -> None:
        self.model = model
        self.prompter = prompter
        self.prefix = prefix
        self.max_batch = max_batch
        self.suffix = model.new_suffix(max_batch, 0)
        self._running: list[_Running] = []

    def run(
        self, requests: Iterable[DecodeRequest], is_cancelled: Callable[[int], bool] = lambda _key: False
    ) -> Iterator[DecodeResult]:
        """Yields each answer as it finishes. `requests` is drawn from only when there is room in the batch, and
        `is_cancelled(key)` is asked of those under way before every step.

        A question that does not fit the context, or whose wanted form cannot be enforced, yields an error result and
        stops no other.

        Raises:
            BatchTooLarge: there is not enough memory; it holds the requests that were under way.
        """
        waiting = iter(requests)
        try:
            while True:
                yield from self._drop_cancelled(is_cancelled)
                yield from self._admit(waiting)
                if not self._running:
                    return
                yield from self._step()
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            raise BatchTooLarge([running.request for running in self._running]) from exc

    def _admit(self, waiting: Iterator[DecodeRequest]) -> Iterator[DecodeResult]:
        room, first = ADMIT_TOKENS, len(self._running)
        while len(self._running) < self.max_batch and room > 0:
            request = next(waiting, None)
            if request is None:
                break
            needed = self.prefix.length + len(request.question_ids) + request.params.max_new_tokens
            if needed > self.model.context_len:
                yield failed(request, ContextExceeded(needed, self.model.context_len))
                continue
            try:
                sampler = self._sampler(request)
            except KernelError as exc:
                yield failed(request, exc)
                continue
            room -= len(request.question_ids)
            self._running.append(_Running(request, sampler, time.perf_counter(), list(request.question_ids)))
            own = len(request.question_ids) + request.params.max_new_tokens
            if own > self.suffix.capacity:
                self.suffix.grow(own)
        if self.model.layout.recurrent:  # questions of one length run together, each in a row of its own
            self._running[first:] = sorted(self._running[first:], key=lambda running: len(running.pending))

    def _sampler(self, request: DecodeRequest) -> Sampler:
        constraint = self.prompter.grammars.start(request.params) if request.params.is_constrained else None
        return Sampler(request.params, request.question_ids, stop_ids=self.prompter.stop_ids, constraint=constraint)

    def _drop_cancelled(self, is_cancelled: Callable[[int], bool]) -> Iterator[DecodeResult]:
        for running in list(self._running):
            if is_cancelled(running.request.key):
                yield self._finish(running, "cancelled")

    def _step(self) -> Iterator[DecodeResult]:
        pending = [running.pending for running in self._running]
        lengths = [running.stored for running in self._running]
        logits = self.model.ask(self.prefix, self.suffix, pending, lengths)
        drawn = draw(logits, [running.sampler for running in self._running])
        now = time.perf_counter()
        for running in self._running:
            running.stored += len(running.pending)  # of all, before one that ends makes room and others move
        for running, choice in zip(list(self._running), drawn, strict=True):
            if isinstance(choice, KernelError):
                yield self._finish(running, "error", choice)
                continue
            token, logprobs = choice
            if not running.answer:
                running.first_token_s = now - running.started
            sampler, params = running.sampler, running.request.params
            if token in sampler.ending:
                yield self._finish(running, "stop")
                continue
            running.answer.append(token)
            running.pending = [token]
            if logprobs is not None:
                running.logprobs.append(logprobs)
            if sampler.is_complete or self._stop_at(running) is not None:
                yield self._finish(running, "stop")
            elif len(running.answer) >= params.max_new_tokens:
                yield self._finish(running, "length")

    def _stop_at(self, running: _Running) -> int | None:
        """Where the first stop string begins in the answer so far, behind the tokens it must have."""
        params = running.request.params
        if not params.stop or len(running.answer) <= params.min_new_tokens:
            return None
        text = self.prompter.text(running.answer)
        # The last of these tokens may end within a character.
        start = len(self.prompter.text(running.answer[: params.min_new_tokens]).rstrip("\ufffd"))
        found = [at for at in (text.find(stop, start) for stop in params.stop) if at >= 0]
        return min(found) if found else None

    def _finish(
        self,
        running: _Running,
        finish: Literal["stop", "length", "cancelled", "error"],
        error: KernelError | None = None,
    ) -> DecodeResult:
        slot = self._running.index(running)
        if error is not None:
            self.suffix.clear(slot)
        final = self._running.pop()
        if final is not running:
            self._running[slot] = final
            self.suffix.move(len(self._running), slot, final.stored)
        constraint = running.sampler.constraint
        if constraint is None:
            text = self.prompter.text(running.answer)[: self._stop_at(running)].strip()
        else:
            text = constraint.text(running.answer)
        return DecodeResult(
            key=running.request.key,
            text=text,
            token_ids=tuple(running.answer),
            finish=finish,
            question_tokens=len(running.request.question_ids),
            first_token_s=running.first_token_s,
            total_s=time.perf_counter() - running.started,
            error=error,
            logprobs=None if running.request.params.logprobs is None else tuple(running.logprobs),
        )


def failed(request: DecodeRequest, error: KernelError) -> DecodeResult:
    """The result of a question that was not answered at all."""
    return DecodeResult(request.key, "", (), "error", len(request.question_ids), 0.0, 0.0, error)
