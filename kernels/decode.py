"""Answering many questions of one or several documents at once, each against the one copy of its document's KV."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from kernels.errors import ContextExceeded, KernelError, NonFiniteLogits
from kernels.kv import PrefixKV, SuffixKV
from kernels.model import Asked, LanguageModel
from kernels.params import GenerationParams
from kernels.prompt import Prompter
from kernels.sampling import Sampler

ADMIT_TOKENS = 512  # question tokens taken up in one step; more would hold up the answers under way


@dataclass(frozen=True)
class DecodeRequest:
    """A question of the document that `prefix` holds; `key` is the caller's name for it."""

    key: int
    question_ids: list[int]
    params: GenerationParams
    prefix: PrefixKV


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
    device_s: float = 0.0  # its share of the steps it took part in: each step's time divided by its rows


@dataclass
class _Running:
    request: DecodeRequest
    sampler: Sampler
    started: float
    pending: list[int]
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    device_s: float = 0.0


@dataclass
class _Document:
    """A document with questions under way. Slot i of the suffix KV belongs to running question i; when one ends, the
    last takes its place, states included."""

    prefix: PrefixKV
    suffix: SuffixKV
    running: list[_Running] = field(default_factory=list)

    def add(self, request: DecodeRequest) -> None:
        own = len(request.question_ids) + request.params.max_new_tokens
        self.suffix.grow(len(self.running) + 1, own)
        sampler = Sampler(request.params, request.question_ids)
        self.running.append(_Running(request, sampler, time.perf_counter(), list(request.question_ids)))

    def remove(self, running: _Running) -> None:
        slot = self.running.index(running)
        final = self.running.pop()
        if final is not running:
            self.running[slot] = final
            self.suffix.move(len(self.running), slot, final.stored)


class Decoder:
    """Continuous batching: a question that is done makes room for the next at once, of the same document or another.

    All that runs takes part in each step, so the weights are read once for the questions of all documents.
    """

    def __init__(self, model: LanguageModel, prompter: Prompter, *, max_batch: int) -> None:
        self.model = model
        self.prompter = prompter
        self.max_batch = max_batch
        self._documents: list[_Document] = []

    @property
    def _num_running(self) -> int:
        return sum(len(document.running) for document in self._documents)

    def run(
        self, requests: Iterable[DecodeRequest], is_cancelled: Callable[[int], bool] = lambda _key: False
    ) -> Iterator[DecodeResult]:
        """Yields each answer as it finishes. `requests` is drawn from only when there is room in the batch, and
        `is_cancelled(key)` is asked of those under way before every step.

        A question that does not fit the context yields an error result and stops no other.
        """
        waiting = iter(requests)
        while True:
            yield from self._drop_cancelled(is_cancelled)
            yield from self._admit(waiting)
            if not self._documents:
                return
            yield from self._step()

    def _admit(self, waiting: Iterator[DecodeRequest]) -> Iterator[DecodeResult]:
        room = ADMIT_TOKENS
        while self._num_running < self.max_batch and room > 0:
            request = next(waiting, None)
            if request is None:
                break
            needed = request.prefix.length + len(request.question_ids) + request.params.max_new_tokens
            if needed > self.model.context_len:
                yield _failed(request, ContextExceeded(needed, self.model.context_len))
                continue
            room -= len(request.question_ids)
            self._document(request.prefix).add(request)
        if self.model.layout.recurrent:  # questions of one length run together, each in a row of its own
            for document in self._documents:
                document.running.sort(key=lambda running: 0 if running.stored else len(running.pending))

    def _document(self, prefix: PrefixKV) -> _Document:
        for document in self._documents:
            if document.prefix is prefix:
                return document
        self._documents.append(_Document(prefix, self.model.new_suffix(0, 0)))
        return self._documents[-1]

    def _drop_cancelled(self, is_cancelled: Callable[[int], bool]) -> Iterator[DecodeResult]:
        for document in list(self._documents):
            for running in list(document.running):
                if is_cancelled(running.request.key):
                    yield self._finish(document, running, "cancelled")

    def _step(self) -> Iterator[DecodeResult]:
        began = time.perf_counter()
        logits = self.model.ask_all(
            Asked(
                document.prefix,
                document.suffix,
                [running.pending for running in document.running],
                [running.stored for running in document.running],
            )
            for document in self._documents
        )
        finite = torch.isfinite(logits).all(-1).tolist()
        now = time.perf_counter()
        stepped = [(document, running) for document in self._documents for running in document.running]
        for _, running in stepped:
            running.device_s += (now - began) / len(stepped)
            running.stored += len(running.pending)  # of all, before one that ends makes room and others move
        for row, (document, running) in enumerate(stepped):
            if not finite[row]:
                yield self._finish(document, running, "error", NonFiniteLogits())
                continue
            token = running.sampler.draw(logits[row])
            if not running.answer:
                running.first_token_s = now - running.started
            params = running.request.params
            if token in self.prompter.stop_ids and not params.ignore_eos:
                yield self._finish(document, running, "stop")
                continue
            running.answer.append(token)
            running.pending = [token]
            if params.stop and self._stop_at(running) is not None:
                yield self._finish(document, running, "stop")
            elif len(running.answer) >= params.max_new_tokens:
                yield self._finish(document, running, "length")

    def _stop_at(self, running: _Running) -> int | None:
        """Where the first stop string begins in the answer so far."""
        text = self.prompter.text(running.answer)
        found = [at for at in (text.find(stop) for stop in running.request.params.stop) if at >= 0]
        return min(found) if found else None

    def _finish(
        self,
        document: _Document,
        running: _Running,
        finish: Literal["stop", "length", "cancelled", "error"],
        error: KernelError | None = None,
    ) -> DecodeResult:
        if error is not None:
            document.suffix.clear(document.running.index(running))
        document.remove(running)
        if not document.running:
            self._documents.remove(document)
        text = self.prompter.text(running.answer)
        cut = self._stop_at(running)
        return DecodeResult(
            key=running.request.key,
            text=text[:cut].strip(),
            token_ids=tuple(running.answer),
            finish=finish,
            question_tokens=len(running.request.question_ids),
            first_token_s=running.first_token_s,
            total_s=time.perf_counter() - running.started,
            error=error,
            device_s=running.device_s,
        )


def _failed(request: DecodeRequest, error: KernelError) -> DecodeResult:
    return DecodeResult(request.key, "", (), "error", len(request.question_ids), 0.0, 0.0, error)
