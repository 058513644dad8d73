"""Answering the lines of a batch file: groups that begin alike share the KV of their common tokens.

A line's prompt is tokenised whole, and the tokens that all lines of its group begin with are computed once. The model
sees the very tokens it would see in one piece, wherever the texts part.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, BinaryIO

from kernels.decode import Decoder, DecodeRequest, DecodeResult
from kernels.errors import ContextExceeded, KernelError
from kernels.halving import answer_all
from kernels.kv import PrefixKV
from pipeline.batch.index import BatchIndex, IndexedLine, groups
from pipeline.batch.journal import Journal
from pipeline.batch.line import BatchRequest, BodyRefused, parse_body, parse_line
from pipeline.batch.record import answered, failed, is_answer, refused_body, refused_line
from tasks.shared_prefix import computed_prefix, shared_prefix
from tasks.workplace import Workplace

LEAST_SHARED = 64  # tokens; fewer are computed again for each line


@dataclass
class Counts:
    """`prompt_tokens` of all answered lines, of which `computed_tokens` were computed in this run."""

    answered: int = 0
    failed: int = 0
    found_done: int = 0
    groups: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0


@dataclass
class _Group:
    """Lines under way. `kv` is let go when the last one is answered and no more come."""

    kv: PrefixKV
    leave: ExitStack
    open: int = 0
    has_more: bool = True


@dataclass(frozen=True)
class _Asked:
    line: IndexedLine
    request: BatchRequest
    group: _Group
    prompt_tokens: int
    cached_tokens: int


@dataclass
class BatchRun(Iterator[DecodeRequest]):
    """Requests of all groups, one group after the other; runs dry while no further KV fits beside those in use."""

    place: Workplace
    tenant: str
    index: BatchIndex
    file: BinaryIO
    journal: Journal
    max_tokens: int
    on_done: Callable[[Counts], None]
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._asked: dict[int, _Asked] = {}
        self._open: list[_Group] = []
        self._coming = groups(self.index.lines)
        self._requests: Iterator[DecodeRequest] = iter(())

    def run(self) -> Counts:
        """Every line that is not in the journal yet.

        Raises:
            StorageError: the store or the database does not answer.
        """
        for line in self.index.lines:
            if line.key in self.journal:
                self.counts.found_done += 1
            elif line.refused is not None:
                self._note(line, refused_line(line.key.hex(), line.refused))
        engine = self.place.engine
        with engine.lock:
            try:
                for result in answer_all(self._decoder, self, self._is_cancelled, max_batch=engine.settings.max_batch):
                    self._take(result)
            finally:
                for group in self._open:
                    group.leave.close()
        return self.counts

    def __next__(self) -> DecodeRequest:
        while True:
            request = next(self._requests, None)
            if request is not None:
                return request
            if self._open and self._held_bytes() > self.place.residents.budget_bytes:
                raise StopIteration  # until some of it is let go
            self._requests = self._of_group(next(self._coming))

    def _held_bytes(self) -> int:
        """With room for one more like the largest."""
        sizes = [group.kv.size_bytes for group in self._open]
        return sum(sizes) + max(sizes)

    def _decoder(self, max_batch: int) -> Decoder:
        return Decoder(self.place.engine.model, self.place.engine.prompter, max_batch=max_batch)

    def _is_cancelled(self, _number: int) -> bool:
        self.place.leave_if_stopping()
        return False

    def _of_group(self, lines: list[IndexedLine]) -> Iterator[DecodeRequest]:
        waiting = [line for line in lines if line.key not in self.journal]
        if not waiting:
            return
        # Over all its lines, also those done: a run that goes on cuts where the first one did.
        common = self._common_tokens(lines) if len(lines) > 1 else []
        if len(common) < LEAST_SHARED:
            for line in waiting:
                yield from self._alone(line)
            return
        group, computed = None, 0
        for line in waiting:
            prompt = self._prompt(line)
            if prompt is None:
                continue
            request, ids = prompt
            if group is None:
                opened = self._shared(line, request, common)
                if opened is None:
                    continue
                group, computed = opened
            cached, computed = len(common) - computed, 0  # what was computed counts for the first line
            yield self._ask(_Asked(line, request, group, len(ids), cached), ids[len(common) :])
        if group is not None:
            group.has_more = False
            self._close_if_done(group)

    def _shared(self, line: IndexedLine, request: BatchRequest, ids: list[int]) -> tuple[_Group, int] | None:
        with ExitStack() as stack:
            try:
                prefix = stack.enter_context(shared_prefix(self.place, self.tenant, ids))
            except KernelError as exc:
                self._note(line, failed(line.key.hex(), request.custom_id, line.number, exc))
                return None
            self.counts.groups += 1
            self.counts.computed_tokens += prefix.computed_tokens
            return self._enter(prefix.kv, stack.pop_all()), prefix.computed_tokens
        raise AssertionError  # an ExitStack without callbacks swallows nothing

    def _alone(self, line: IndexedLine) -> Iterator[DecodeRequest]:
        prompt = self._prompt(line)
        if prompt is None:
            return
        request, ids = prompt
        try:
            kv = computed_prefix(self.place, ids[:-1])
        except KernelError as exc:
            self._note(line, failed(line.key.hex(), request.custom_id, line.number, exc))
            return
        self.counts.computed_tokens += len(ids) - 1
        group = self._enter(kv, ExitStack())
        group.has_more = False
        yield self._ask(_Asked(line, request, group, len(ids), 0), ids[-1:])

    def _enter(self, kv: PrefixKV, leave: ExitStack) -> _Group:
        self._open.append(_Group(kv, leave))
        return self._open[-1]

    def _ask(self, asked: _Asked, ids: list[int]) -> DecodeRequest:
        self._asked[asked.line.number] = asked
        asked.group.open += 1
        self.counts.computed_tokens += len(ids)
        return DecodeRequest(asked.line.number, ids, asked.request.params, asked.group.kv)

    def _request(self, line: IndexedLine) -> BatchRequest:
        custom_id, body = parse_line(self.index.read(self.file, line), line.number)
        return parse_body(custom_id, body, max_tokens=self.max_tokens)

    def _ids(self, request: BatchRequest) -> list[int]:
        return self.place.engine.prompter.chat_ids([(one.role, one.content) for one in request.messages])

    def _prompt(self, line: IndexedLine) -> tuple[BatchRequest, list[int]] | None:
        """None: it cannot be asked, which is noted."""
        custom_id, body = parse_line(self.index.read(self.file, line), line.number)
        key, context = line.key.hex(), self.place.engine.context_len
        try:
            request = parse_body(custom_id, body, max_tokens=self.max_tokens)
            ids = self._ids(request)
        except BodyRefused as exc:
            self._note(line, refused_body(key, custom_id, line.number, exc))
            return None
        except KernelError as exc:
            refused = BodyRefused(str(exc), param="messages")
            self._note(line, refused_body(key, custom_id, line.number, refused))
            return None
        needed = len(ids) + request.params.max_new_tokens
        if needed > context:
            self._note(line, failed(key, custom_id, line.number, ContextExceeded(needed, context)))
            return None
        return request, ids

    def _common_tokens(self, lines: list[IndexedLine]) -> list[int]:
        """What all that can be asked begin with; at least one token of each is left."""
        common: list[int] | None = None
        for line in lines:
            try:
                ids = self._ids(self._request(line))
            except (BodyRefused, KernelError):
                continue
            if common is None:
                common = ids[:-1]
            else:
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(common, ids[:-1], strict=False)))
                common = common[:same]
        return common or []

    def _take(self, result: DecodeResult) -> None:
        asked = self._asked.pop(result.key)
        key, custom_id = asked.line.key.hex(), asked.request.custom_id
        if result.error is not None:
            self._note(asked.line, failed(key, custom_id, asked.line.number, result.error))
        else:
            self.counts.prompt_tokens += asked.prompt_tokens
            self.counts.output_tokens += len(result.token_ids)
            record = answered(
                key,
                custom_id,
                result,
                self.place.engine.prompter,
                model=self.place.engine.name,
                prompt=asked.prompt_tokens,
                cached=asked.cached_tokens,
            )
            self._note(asked.line, record)
        asked.group.open -= 1
        self._close_if_done(asked.group)

    def _note(self, line: IndexedLine, record: dict[str, Any]) -> None:
        self.journal.add(line.key, record)
        if is_answer(record):
            self.counts.answered += 1
        else:
            self.counts.failed += 1
        self.on_done(self.counts)

    def _close_if_done(self, group: _Group) -> None:
        if not group.has_more and not group.open:
            self._open.remove(group)
            group.leave.close()
