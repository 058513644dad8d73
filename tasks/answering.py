"""One run of the decode task: claims, requests and commits of all the documents that it answers side by side."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from sqlalchemy.orm import Session

from kernels.decode import Decoder, DecodeRequest, DecodeResult
from kernels.drafting import Lookup
from kernels.errors import ConstraintRefused, MemoryExceeded, ParamsRefused
from kernels.halving import answer_all
from kernels.params import GenerationParams
from kernels.prompt import Prompter
from kernels.quote import QuoteIndex
from kernels.sampling import TokenLogprobs
from storage.database import utc_now
from storage.errors import ObjectMissing, SnapshotMissing, StoreUnusable
from storage.items import (
    NewAnswer,
    OpenItem,
    answer_items,
    cancel_item,
    claim_items,
    fail_item,
    is_suspect,
    release_items,
)
from storage.noted_ways import split_choice
from storage.schema import SnapshotRow
from storage.snapshots import get_snapshot, quarantine
from storage.tiers import Tier
from storage.units import Unit
from storage.ways import Choice, DocumentKey
from tasks.errors import PromptChanged, ReadingEnded, WrongModel
from tasks.loading import DAMAGED, LoadedPrefix, stored
from tasks.metrics import note_answer, note_batch
from tasks.progress import send_progress
from tasks.quoting import Answered, Quoting
from tasks.room import refuse_waiting
from tasks.turns import Turns
from tasks.work_spans import AnswerSpans, of_waiting
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
NO_LOAD: tuple[float, int, str | None] = (0.0, 0, None)
FEW_QUESTIONS = 8  # with more at once, guessing ahead in the document does not pay, and its text is not read for it


class Opening(Protocol):
    """How a run comes by a document's KV; `stored` loads its snapshot."""

    def __call__(self, place: Workplace, row: SnapshotRow, owner: str) -> AbstractContextManager[LoadedPrefix]:
        """
        Raises:
            SnapshotMissing: it is not ready any more.
            ReadingEnded: there is nothing to answer from, and no more to do.
        """


class Alone(NamedTuple):
    """Of a run that answers one document: why, and where its KV comes from. Others load snapshots, and how each was
    chosen is in the rows."""

    choice: Choice
    opening: Opening


@dataclass
class _Open:
    """A snapshot that is answered from. Its leases and claims are held under the owner of its unit. The items in
    `waited` were there while it was read."""

    row: SnapshotRow
    unit: Unit
    prefix: LoadedPrefix
    choice: Choice
    spans: AnswerSpans
    leave: ExitStack
    waited: set[int] = field(default_factory=set)
    items: set[int] = field(default_factory=set)
    finished: list[Answered] = field(default_factory=list)  # and not yet written
    claims: int = 0
    has_more: bool = True
    used_s: float = 0.0

    @property
    def owner(self) -> str:
        return self.unit.owner


class _Words:
    """What is needed of a document's text beside its snapshot; each made once, when first needed. None: the text was
    erased, and its items end elsewhere, or the tokenizer cannot say it."""

    def __init__(self, place: Workplace, row: SnapshotRow) -> None:
        self._place = place
        self._row = row

    @cached_property
    def _text(self) -> str | None:
        with suppress(ObjectMissing):
            return self._place.text(self._row.tenant, self._row.document_id)
        return None

    @cached_property
    def lookup(self) -> Lookup | None:
        with suppress(StoreUnusable):  # it only saves time
            return None if self._text is None else Lookup(self._place.engine.prompter.prefix_ids(self._text))
        return None

    @cached_property
    def quotes(self) -> QuoteIndex | None:
        try:
            return None if self._text is None else self._place.engine.prompter.quotes(self._text)
        except ConstraintRefused as exc:
            logger.warning("no quotes", extra={"reason": exc.reason})
            return None


class Answering:
    """One run, from its first unit to the last that it takes in; it holds them until they are answered or it is
    closed."""

    def __init__(
        self,
        place: Workplace,
        turns: Turns,
        unit: Unit,
        row: SnapshotRow,
        alone: Alone | None = None,
    ) -> None:
        self.place = place
        self._alone = alone
        self.lost: list[SnapshotRow] = []
        self.num_claimed = 0
        self._turns = turns
        self._unit = unit
        self._held = {unit.owner: unit}
        self._todo = [(unit, row)]
        self._num_seen = 0
        self._open: list[_Open] = []
        self._is_suspect = False  # a worker died on a document that is answered here
        self._decoder: Decoder
        self._quoting: Quoting
        most = place.engine.settings.max_batch
        self._max_batch = most if unit.tier == Tier.BATCH else min(most, place.settings.fast_batch)
        self._fitting_batch = self._max_batch
        self._is_full = False

    def answer(self) -> None:
        """Every answer is written as soon as it is there, before the next step.

        Raises:
            StorageError: the store or the database does not answer.
            SystemExit: this process has been told to stop; what was under way by then may be answered.
        """
        engine = self.place.engine

        def new_decoder(max_batch: int) -> Decoder:
            self._decoder = Decoder(engine.model, engine.prompter, max_batch=min(max_batch, self._fitting_batch))
            return self._decoder

        while True:
            try:
                self._quoting = Quoting(engine.prompter, self._requests())
                requests = _AfterWriting(self._write, self._quoting)
                for result in answer_all(new_decoder, requests, self._is_cancelled, max_batch=self._max_batch):
                    self._take(result)
                self._write()
                self.place.leave_if_draining()
                return
            except (*DAMAGED, PromptChanged):
                self._write()
                if not self._set_aside_what_is_wrong():
                    raise
                self.give_back()
                self._todo = [(each.unit, each.row) for each in self._open]
                for each in list(self._open):
                    self._leave(each)

    def give_back(self) -> None:
        """All that is held goes back to the queue at once, not counted as an attempt."""
        with self.place.database.writing() as session:
            for each in self._open:
                release_items(session, each.owner)

    def close(self, let_go: Callable[[Unit], None] | None = None) -> None:
        """Lets go of everything; of units by `let_go`, or as ended."""
        for each in list(self._open):
            self._close(each, let_go)
        for unit in list(self._held.values()):
            self._let_go(unit, let_go or self._turns.put_back)

    def _requests(self) -> Iterator[DecodeRequest]:
        prompter = self.place.engine.prompter
        for unit, row in self._rows():
            opened = self._enter(unit, row)
            words = _Words(self.place, row)
            while opened is not None and self._may_claim(opened) and (items := self._claim(opened)):
                opened.items |= {item.item_id for item in items}
                self._is_suspect |= any(item.attempts for item in items)
                lookup = words.lookup if len(items) <= FEW_QUESTIONS else None
                for number, item in enumerate(items):
                    if not self.place.may_claim():
                        self._release(opened, items[number:])
                        break
                    try:
                        params = GenerationParams.checked(**item.params)
                    except ParamsRefused as exc:
                        self._fail(opened, item.item_id, str(exc))
                        continue
                    ids = prompter.question_ids(item.question)
                    request = DecodeRequest(item.item_id, ids, params, opened.prefix.kv, lookup)
                    if params.quote and words.quotes is not None:
                        self._quoting.want(request, item.question, words.quotes)
                    yield request
            if opened is not None:
                opened.has_more = False
                self._close_if_done(opened)

    def _rows(self) -> Iterator[tuple[Unit, SnapshotRow]]:
        """Those to be answered, then others that wait, as long as they fit into the memory for snapshots. None beside
        a document that a worker died on, so that it does not take others with it once more."""
        while self._todo and self.place.may_claim():
            self._num_seen += 1
            yield self._todo.pop(0)
        place = self.place
        while self._may_take_in():
            held = sum(each.prefix.kv.size_bytes for each in self._open)
            room = place.residents.budget_bytes - held
            unit = self._turns.take_beside(self._unit) if room > 0 else None
            if unit is None:
                return
            self._num_seen += 1
            self._held[unit.owner] = unit
            if self._has_killed(unit):
                continue  # put back behind this run
            try:
                with place.database.reading() as session:
                    row = get_snapshot(session, unit.snapshot_id or 0)
                place.engine.check_fingerprint(row.snapshot_id, row.fields)
            except (SnapshotMissing, WrongModel):
                self._let_go(unit, self._turns.drop)
                continue
            if place.engine.model.prefix_bytes(row.num_tokens or 0) > room:
                self._let_go(unit, self._turns.put_back)
                return
            yield unit, row

    def _has_killed(self, unit: Unit) -> bool:
        with self.place.database.reading() as session:
            return is_suspect(session, unit.tenant, unit.document_id)

    def _may_take_in(self) -> bool:
        """Whether others may be answered beside the first document. One that was read for this is answered alone."""
        most = self.place.settings.documents_per_task
        is_open = self._alone is None and not self._is_full and not self._is_suspect
        return is_open and self._num_seen < most and self.place.may_claim()

    def _enter(self, unit: Unit, row: SnapshotRow) -> _Open | None:
        """None: it is out of use, and lost, or does not fit into memory."""
        place = self.place
        with ExitStack() as stack:
            stack.enter_context(place.heartbeat.holding(unit.owner))
            try:
                opening = stored if self._alone is None else self._alone.opening
                prefix = stack.enter_context(opening(place, row, unit.owner))
            except SnapshotMissing:
                self._lose(unit, row)
                return None
            except ReadingEnded:
                self._let_go(unit, self._turns.drop)
                return None
            except DAMAGED as exc:
                self._quarantine(unit, row, exc)
                return None
            except MemoryExceeded as exc:
                if self._open:  # there may be room once the others are answered
                    self._is_full = True
                    self._let_go(unit, self._turns.put_back)
                else:
                    refuse_waiting(place, row, exc)
                    self._let_go(unit, self._turns.drop)
                return None
            self._fitting_batch = min(self._fitting_batch, prefix.max_batch)
            self._decoder.max_batch = min(self._decoder.max_batch, self._fitting_batch)
            choice = self._split_choice(row) if self._alone is None else self._alone.choice
            spans = AnswerSpans(prefix, choice)
            self._open.append(_Open(row, unit, prefix, choice, spans, stack.pop_all(), used_s=prefix.read_s))
        return self._open[-1]

    def _split_choice(self, row: SnapshotRow) -> Choice:
        with self.place.database.reading() as session:
            return split_choice(session, DocumentKey(row.tenant, row.document_id))

    def _may_claim(self, opened: _Open) -> bool:
        """The first questions always; further ones only while no others are to be let in first."""
        if not self.place.may_claim():
            return False
        return not opened.claims or not self._turns.gives_way(opened.unit, claims=opened.claims)

    def _claim(self, opened: _Open) -> list[OpenItem]:
        place, row = self.place, opened.row

        def claim(session: Session) -> list[OpenItem]:
            return claim_items(
                session,
                tenant=row.tenant,
                document_id=row.document_id,
                model=place.engine.name,
                owner=opened.owner,
                limit=self._max_batch,
                now=utc_now(),
                lease_s=place.settings.lease_s,
                only_fast=opened.unit.tier == Tier.FAST,
            )

        items = place.database.retrying(claim)
        if opened.prefix.read_s and not opened.claims:
            opened.waited = {item.item_id for item in items}
        opened.claims += 1
        self.num_claimed += len(items)
        if items:
            note_batch(len(items))
            opened.spans.begin(items)
            send_progress(batch=len(items))
        return items

    def _release(self, opened: _Open, items: list[OpenItem]) -> None:
        """Gives items back that were not begun."""
        item_ids = {item.item_id for item in items}

        def release(session: Session) -> None:
            release_items(session, opened.owner, item_ids)

        self.place.database.retrying(release)
        opened.items -= item_ids
        opened.spans.release(item_ids)

    def _is_cancelled(self, item_id: int) -> bool:
        self._write()
        self.place.leave_if_stopping()
        return self.place.heartbeat.is_cancelled(self._holder(item_id).owner, item_id)

    def _holder(self, item_id: int) -> _Open:
        return next(each for each in self._open if item_id in each.items)

    def _take(self, result: DecodeResult) -> None:
        opened = self._holder(result.key)
        opened.prefix.prove()
        answered = self._quoting.take(result)
        if answered is None:
            return
        if result.key in opened.waited:
            answered = answered._replace(result=_later(answered.result, opened.prefix.read_s))
        opened.finished.append(answered)

    def _write(self) -> None:
        """Writes what has finished, all of a step and a document in one transaction; dropped in silence where an item
        has meanwhile passed to another worker."""
        for opened in [each for each in self._open if each.finished]:
            finished, opened.finished = opened.finished, []
            self._commit(opened, finished)
            for result, _, _ in finished:
                note_answer(
                    finish=result.finish,
                    first_token_s=result.first_token_s,
                    total_s=result.total_s,
                    output_tokens=len(result.token_ids),
                )
                opened.items.remove(result.key)
                opened.spans.end(result.key, result)
            self._close_if_done(opened)

    def _commit(self, opened: _Open, finished: list[Answered]) -> None:
        prefix, owner = opened.prefix, opened.owner
        load = NO_LOAD if prefix.is_charged else (prefix.load_s, prefix.load_bytes, prefix.loaded_from)
        answers: dict[int, NewAnswer] = {}
        for each in finished:
            if each.result.error is None and each.result.finish != "cancelled":
                answers[each.result.key] = self._new_answer(opened, each, NO_LOAD if answers else load)

        def commit(session: Session) -> set[int]:
            now = utc_now()
            for result, _, _ in finished:
                if result.error is not None:
                    fail_item(session, result.key, owner=owner, code="decode_failed", error=str(result.error), now=now)
                elif result.finish == "cancelled":
                    cancel_item(session, result.key, owner=owner, now=now)
            return answer_items(session, answers, owner=owner, now=now) if answers else set()

        if self.place.database.retrying(commit):
            prefix.is_charged = True
        opened.used_s += sum(result.device_s for result, _, _ in finished) + load[0]

    def _new_answer(self, opened: _Open, answered: Answered, load: tuple[float, int, str | None]) -> NewAnswer:
        result, quote_prompt, quote = answered
        logprobs = None if result.logprobs is None else _logprobs(self.place.engine.prompter, result.logprobs)
        return NewAnswer(
            text=result.text,
            finish=result.finish,
            snapshot_id=opened.row.snapshot_id,
            cached_tokens=opened.prefix.kv.length,
            question_tokens=result.question_tokens,
            output_tokens=len(result.token_ids),
            first_token_s=result.first_token_s,
            total_s=result.total_s,
            worker=self.place.worker_name,
            logprobs=logprobs,
            quote_prompt=quote_prompt,
            quote=quote.text if quote else None,
            quote_start=quote.start if quote else None,
            quote_stop=quote.stop if quote else None,
            device_s=result.device_s,
            load_s=load[0],
            load_bytes=load[1],
            loaded_from=load[2],
            way=opened.choice.way,
            why=opened.choice.why,
        )

    def _fail(self, opened: _Open, item_id: int, error: str) -> None:
        """Ends an item that cannot be asked."""

        def fail(session: Session) -> None:
            fail_item(session, item_id, owner=opened.owner, code="decode_failed", error=error, now=utc_now())

        self.place.database.retrying(fail)
        opened.items.remove(item_id)
        opened.spans.release({item_id})

    def _close_if_done(self, opened: _Open) -> None:
        if not opened.has_more and not opened.items:
            self._close(opened)

    def _close(self, opened: _Open, let_go: Callable[[Unit], None] | None = None) -> None:
        self._leave(opened)
        self._let_go(opened.unit, let_go or partial(self._turns.end, used_s=opened.used_s))

    def _leave(self, opened: _Open) -> None:
        """Its unit stays held."""
        opened.spans.close(sys.exception())
        self._open.remove(opened)
        opened.leave.close()

    def _let_go(self, unit: Unit, how: Callable[[Unit], None]) -> None:
        del self._held[unit.owner]
        how(unit)

    def _set_aside_what_is_wrong(self) -> bool:
        """Takes every open snapshot that does not prove right out of use; its items go back. False: all are right."""
        wrong: list[tuple[_Open, Exception]] = []
        for each in list(self._open):
            try:
                each.prefix.prove()
            except (*DAMAGED, PromptChanged) as exc:
                wrong.append((each, exc))
        with self.place.database.writing() as session:
            for each, _ in wrong:
                release_items(session, each.owner)
        for each, reason in wrong:
            self._leave(each)
            if isinstance(reason, PromptChanged):
                self._lose(each.unit, each.row)
            else:
                self._quarantine(each.unit, each.row, reason)
        return bool(wrong)

    def _quarantine(self, unit: Unit, row: SnapshotRow, exc: Exception) -> None:
        logger.warning("snapshot is damaged", extra={"snapshot_id": row.snapshot_id, "reason": type(exc).__name__})
        with of_waiting(self.place, "load", DocumentKey(row.tenant, row.document_id)) as span:
            span.note(snapshot_id=row.snapshot_id)
            span.fail(exc)
        with self.place.database.writing() as session:
            quarantine(session, row.snapshot_id, str(exc))
        self._lose(unit, row)

    def _lose(self, unit: Unit, row: SnapshotRow) -> None:
        """Its questions wait for another snapshot."""
        self.lost.append(row)
        self._let_go(unit, self._turns.drop)


class _AfterWriting(Iterator[DecodeRequest]):
    """Requests that are asked for once what a step has finished is written."""

    def __init__(self, write: Callable[[], None], requests: Iterator[DecodeRequest]) -> None:
        self._write, self._requests = write, requests

    def __next__(self) -> DecodeRequest:
        self._write()
        return next(self._requests)


def _later(result: DecodeResult, seconds: float) -> DecodeResult:
    """For who had waited so long when the batch took it up."""
    return replace(result, first_token_s=result.first_token_s + seconds, total_s=result.total_s + seconds)


def _logprobs(prompter: Prompter, tokens: tuple[TokenLogprobs, ...]) -> list[dict[str, Any]]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"id": token_id, "text": prompter.text([token_id]), "logprob": round(logprob, 6)}

    return [{**entry(token.token_id, token.logprob), "top": [entry(*each) for each in token.top]} for token in tokens]
