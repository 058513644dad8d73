"""Answering many questions of one or several documents at once, each against the one copy of its document's KV."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from torch import Tensor

from kernels.constraint import Constraint
from kernels.drafting import MOST_GUESSED, Drafting, Lookup
from kernels.errors import BatchTooLarge, ContextExceeded, KernelError
from kernels.kv import PrefixKV, SuffixKV
from kernels.model import Asked, LanguageModel
from kernels.out_of_memory import is_out_of_memory
from kernels.params import GenerationParams
from kernels.prompt import Prompter
from kernels.quote import QuoteIndex
from kernels.sampling import Sampler, TokenLogprobs, draw

ADMIT_TOKENS = 512  # question tokens taken up in one step; more would hold up the answers under way


Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class DecodeRequest:
    """A question of the document that `prefix` holds; `key` is the caller's name for it.

    With a `lookup` in the document, several tokens of the answer may come from one step, where that is faster.
    With `quotes`, the answer is a span of that document, or none.
    """

    key: int
    question_ids: list[int]
    params: GenerationParams
    prefix: PrefixKV
    lookup: Lookup | None = None
    quotes: QuoteIndex | None = None


@dataclass(frozen=True)
class DecodeResult:
    """A finished answer, or the error that ended it. Times are seconds from the question's start in the batch."""

    key: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    question_tokens: int
    first_token_s: float
    total_s: float
    error: KernelError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token, where the request wants them
    device_s: float = 0.0  # its share of the steps it took part in: each step's time divided by its rows


@dataclass
class _Running:
    request: DecodeRequest
    sampler: Sampler
    started: float
    pending: list[int]  # what comes next, and guesses behind it
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_token_s: float = 0.0
    device_s: float = 0.0


@dataclass
class _Document:
    """A document with questions under way. Slot i of the suffix KV belongs to running question i; when one ends, the
    last takes its place, states included."""

    prefix: PrefixKV
    suffix: SuffixKV
    running: list[_Running] = field(default_factory=list)

    def add(self, request: DecodeRequest, sampler: Sampler) -> None:
        own = len(request.question_ids) + request.params.max_new_tokens
        self.suffix.grow(len(self.running) + 1, own)
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
        self._drafting = Drafting(model.step_times)

    @property
    def _num_running(self) -> int:
        return sum(len(document.running) for document in self._documents)

    def run(
        self, requests: Iterable[DecodeRequest], is_cancelled: Callable[[int], bool] = lambda _key: False
    ) -> Iterator[DecodeResult]:
        """Yields each answer as it finishes. `requests` is drawn from only when there is room in the batch: it may run
        dry and have more once the answers so far were taken. `is_cancelled(key)` is asked of those under way before
        every step.

        A question that does not fit the context, or whose wanted form cannot be enforced, yields an error result and
        stops no other.

        Raises:
            BatchTooLarge: there is not enough memory; it holds the requests that were under way.
        """
        waiting = iter(requests)
        while True:
            yield from self._drop_cancelled(is_cancelled)
            yield from self._admit(waiting)
            if not self._documents:
                return
            with self._within_memory():
                yield from self._step()

    @contextmanager
    def _within_memory(self, *beginning: DecodeRequest) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            running = [each.request for document in self._documents for each in document.running]
            raise BatchTooLarge([*running, *beginning]) from exc

    def _admit(self, waiting: Iterator[DecodeRequest]) -> Iterator[DecodeResult]:
        room = ADMIT_TOKENS
        while self._num_running < self.max_batch and room > 0:
            request = next(waiting, None)
            if request is None:
                break
            needed = request.prefix.length + len(request.question_ids) + request.params.max_new_tokens
            if needed > self.model.context_len:
                yield failed(request, ContextExceeded(needed, self.model.context_len))
                continue
            try:
                sampler = self._sampler(request)
            except KernelError as exc:
                yield failed(request, exc)
                continue
            room -= len(request.question_ids)
            with self._within_memory(request):
                self._document(request.prefix).add(request, sampler)
        if self.model.layout.recurrent:  # questions of one length run together, each in a row of its own
            for document in self._documents:
                document.running.sort(key=lambda running: 0 if running.stored else len(running.pending))

    def _document(self, prefix: PrefixKV) -> _Document:
        for document in self._documents:
            if document.prefix is prefix:
                return document
        self._documents.append(_Document(prefix, self.model.new_suffix(0, 0)))
        return self._documents[-1]

    def _sampler(self, request: DecodeRequest) -> Sampler:
        constraint: Constraint | None = None
        if request.quotes is not None:
            constraint = request.quotes.start()
        elif request.params.is_constrained:
            constraint = self.prompter.grammars.start(request.params)
        return Sampler(request.params, request.question_ids, stop_ids=self.prompter.stop_ids, constraint=constraint)

    def _drop_cancelled(self, is_cancelled: Callable[[int], bool]) -> Iterator[DecodeResult]:
        for document in list(self._documents):
            for running in list(document.running):
                if is_cancelled(running.request.key):
                    yield self._finish(document, running, "cancelled")

    def _step(self) -> Iterator[DecodeResult]:
        stepped = [(document, running) for document in self._documents for running in document.running]
        guesses = self._guess([running for _, running in stepped])
        began = time.perf_counter()
        logits = self.model.ask_all(
            [
                Asked(
                    document.prefix,
                    document.suffix,
                    [running.pending for running in document.running],
                    [running.stored for running in document.running],
                )
                for document in self._documents
            ],
            every=guesses > 0,
        )
        now = time.perf_counter()
        for _, running in stepped:
            running.device_s += (now - began) / len(stepped)
        if all(running.answer for _, running in stepped):
            self.model.step_times.note(len(stepped) + guesses, now - began)
        rows = list(accumulate((len(running.pending) if guesses else 1 for _, running in stepped), initial=0))
        begun = [(row, document, running) for row, (document, running) in zip(rows, stepped, strict=False)]
        yield from self._take(logits, begun, guesses, now)

    def _guess(self, stepped: list[_Running]) -> int:
        """Adds guesses to what is pending, where that pays; returns how many."""
        if self.model.layout.recurrent or not self._drafting.pays(len(stepped)):
            return 0
        if any(running.request.lookup is None or not running.answer for running in stepped):
            return 0  # beside whole questions, scores of every token would cost more than they save
        for running in stepped:
            assert running.request.lookup is not None
            most = min(MOST_GUESSED, running.request.params.max_new_tokens - len(running.answer) - 1)
            running.pending += running.request.lookup.guess(running.answer, most)
        return sum(len(running.pending) - 1 for running in stepped)

    def _take(
        self, logits: Tensor, begun: list[tuple[int, _Document, _Running]], guesses: int, now: float
    ) -> Iterator[DecodeResult]:
        """Draws the next token of each answer, and further ones where the guesses before them were right."""
        guessed = {id(running): running.pending[1:] if guesses else [] for _, _, running in begun}
        for _, _, running in begun:
            # What was guessed counts when it proves right.
            running.stored += len(running.pending) - len(guessed[id(running)])
        right = 0
        ended: list[tuple[_Document, _Running, Finish, KernelError | None]] = []
        while begun:
            rows = [row for row, _, _ in begun]
            scores = logits if len(rows) == len(logits) else logits[rows]  # mostly all, and then without a copy
            drawn = draw(scores, [running.sampler for _, _, running in begun], self.model.look)
            going_on = []
            for (row, document, running), choice in zip(begun, drawn, strict=True):
                if isinstance(choice, KernelError):
                    ended.append((document, running, "error", choice))
                    continue
                token, logprobs = choice
                if not running.answer:
                    running.first_token_s = now - running.started
                if token in running.sampler.ending:
                    ended.append((document, running, "stop", None))
                    continue
                running.answer.append(token)
                running.pending = [token]
                if logprobs is not None:
                    running.logprobs.append(logprobs)
                if running.sampler.is_complete or self._stop_at(running) is not None:
                    ended.append((document, running, "stop", None))
                elif len(running.answer) >= running.request.params.max_new_tokens:
                    ended.append((document, running, "length", None))
                elif (rest := guessed[id(running)]) and rest.pop(0) == token:
                    running.stored += 1
                    right += 1
                    going_on.append((row + 1, document, running))
            begun = going_on
        self._drafting.note(guesses, right)
        for document, running, finish, error in ended:  # only now: what ends makes room, and others move
            yield self._finish(document, running, finish, error)

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
        document: _Document,
        running: _Running,
        finish: Finish,
        error: KernelError | None = None,
    ) -> DecodeResult:
        if error is not None:
            document.suffix.clear(document.running.index(running))
        document.remove(running)
        if not document.running:
            self._documents.remove(document)
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
            device_s=running.device_s,
        )


def failed(request: DecodeRequest, error: KernelError) -> DecodeResult:
    """The result of a question that was not answered at all."""
    return DecodeResult(request.key, "", (), "error", len(request.question_ids), 0.0, 0.0, error)
