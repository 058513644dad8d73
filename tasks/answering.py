"""One run of the decode task: claims, requests and commits of all the documents that it answers side by side."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
from storage.documents import get_text
from storage.errors import ObjectMissing
from storage.items import (
    NewAnswer,
    OpenItem,
    answer_item,
    cancel_item,
    claim_items,
    fail_item,
    release_items,
)
from storage.schema import SnapshotRow
from storage.snapshots import quarantine
from storage.waiting import next_waiting_snapshot
from tasks.errors import PromptChanged, WrongModel
from tasks.loading import DAMAGED, LoadedPrefix, leased, loaded
from tasks.metrics import note_answer, note_batch
from tasks.progress import send_progress
from tasks.quoting import Answered, Quoting
from tasks.room import refuse_waiting
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
FEW_QUESTIONS = 8  # with more at once, guessing ahead in the document does not pay, and its text is not read for it


@dataclass
class _Open:
    """A snapshot that is answered from. Its leases and claims are held under `owner`."""

    row: SnapshotRow
    owner: str
    prefix: LoadedPrefix
    leave: ExitStack
    items: set[int] = field(default_factory=set)
    has_more: bool = True


class _Words:
    """What is needed of a document's text beside its snapshot; each made once, when first needed. None: the text was
    erased, and its items end elsewhere, or the tokenizer cannot say it."""

    def __init__(self, place: Workplace, row: SnapshotRow) -> None:
        self._place = place
        self._row = row

    @cached_property
    def _text(self) -> str | None:
        with suppress(ObjectMissing):
            return get_text(self._place.store, self._row.tenant, self._row.document_id)
        return None

    @cached_property
    def lookup(self) -> Lookup | None:
        return None if self._text is None else Lookup(self._place.engine.prompter.prefix_ids(self._text))

    @cached_property
    def quotes(self) -> QuoteIndex | None:
        try:
            return None if self._text is None else self._place.engine.prompter.quotes(self._text)
        except ConstraintRefused as exc:
            logger.warning("no quotes", extra={"reason": exc.reason})
            return None


class Answering:
    """One run of the decode task, from its first snapshot to the last that it takes in."""

    def __init__(self, place: Workplace, row: SnapshotRow) -> None:
        self.place = place
        self.lost: list[SnapshotRow] = []
        self._todo = [row]
        self._seen: set[int] = set()
        self._open: list[_Open] = []
        self._is_suspect = False  # a worker died on a document that is answered here
        self._decoder: Decoder
        self._quoting: Quoting
        self._fitting_batch = place.engine.settings.max_batch

    def answer(self) -> None:
        """Every answer is written as soon as it is there.

        Raises:
            StorageError: the store or the database does not answer.
            SystemExit: this process has been told to stop; what was under way by then may be answered.
        """
        engine = self.place.engine

        def new_decoder(max_batch: int) -> Decoder:
            self._decoder = Decoder(engine.model, engine.prompter, max_batch=min(max_batch, self._fitting_batch))
            return self._decoder

        while True:
            batch = engine.settings.max_batch
            try:
                self._quoting = Quoting(engine.prompter, self._requests())
                for result in answer_all(new_decoder, self._quoting, self._is_cancelled, max_batch=batch):
                    self._take(result)
                self.place.leave_if_draining()
                return
            except (*DAMAGED, PromptChanged):
                if not self._set_aside_what_is_wrong():
                    raise
                self.give_back()
                self._todo = [each.row for each in self._open]
                self.close()

    def give_back(self) -> None:
        """All that is held goes back to the queue at once, not counted as an attempt."""
        with self.place.database.writing() as session:
            for each in self._open:
                release_items(session, each.owner)

    def close(self) -> None:
        for each in list(self._open):
            self._close(each)

    def _requests(self) -> Iterator[DecodeRequest]:
        prompter = self.place.engine.prompter
        for row in self._rows():
            opened = self._enter(row)
            words = _Words(self.place, row)
            while opened is not None and self.place.may_claim() and (items := self._claim(opened)):
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

    def _rows(self) -> Iterator[SnapshotRow]:
        """Those to be answered, then others that wait, as long as they fit into the memory for snapshots. None beside
        a document that a worker died on, so that it does not take others with it once more."""
        while self._todo and self.place.may_claim():
            row = self._todo.pop(0)
            self._seen.add(row.snapshot_id)
            yield row
        place = self.place
        while not self._is_suspect and len(self._seen) < place.settings.documents_per_task and place.may_claim():
            with place.database.reading() as session:
                found = next_waiting_snapshot(session, model=place.engine.name, passed_over=self._seen, now=utc_now())
            if found is None:
                return
            self._seen.add(found.snapshot_id)
            held = sum(each.prefix.kv.size_bytes for each in self._open)
            if held + place.engine.model.prefix_bytes(found.num_tokens or 0) > place.residents.budget_bytes:
                return
            with suppress(WrongModel):
                place.engine.check_fingerprint(found.snapshot_id, found.fields)
                yield found

    def _enter(self, row: SnapshotRow) -> _Open | None:
        """None: it is out of use, and lost, or does not fit into memory."""
        place, owner = self.place, self.place.new_owner()
        with ExitStack() as stack:
            stack.enter_context(place.heartbeat.holding(owner))
            if not stack.enter_context(leased(place, row.snapshot_id, owner)):
                self.lost.append(row)
                return None
            try:
                prefix = stack.enter_context(loaded(place, row))
            except DAMAGED as exc:
                self._quarantine(row, exc)
                return None
            except MemoryExceeded as exc:
                if not self._open:  # else there may be room once the others are answered
                    refuse_waiting(place, row, exc)
                return None
            self._fitting_batch = min(self._fitting_batch, prefix.max_batch)
            self._decoder.max_batch = min(self._decoder.max_batch, self._fitting_batch)
            self._open.append(_Open(row, owner, prefix, stack.pop_all()))
        return self._open[-1]

    def _claim(self, opened: _Open) -> list[OpenItem]:
        place, row = self.place, opened.row

        def claim(session: Session) -> list[OpenItem]:
            return claim_items(
                session,
                tenant=row.tenant,
                document_id=row.document_id,
                model=place.engine.name,
                owner=opened.owner,
                limit=place.engine.settings.max_batch,
                now=utc_now(),
                lease_s=place.settings.lease_s,
            )

        items = place.database.retrying(claim)
        if items:
            note_batch(len(items))
            send_progress(batch=len(items))
        return items

    def _release(self, opened: _Open, items: list[OpenItem]) -> None:
        """Gives items back that were not begun."""
        item_ids = {item.item_id for item in items}

        def release(session: Session) -> None:
            release_items(session, opened.owner, item_ids)

        self.place.database.retrying(release)
        opened.items -= item_ids

    def _is_cancelled(self, item_id: int) -> bool:
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
        self._commit(opened, answered)
        note_answer(
            finish=answered.result.finish,
            first_token_s=answered.result.first_token_s,
            total_s=answered.result.total_s,
            output_tokens=len(answered.result.token_ids),
        )
        opened.items.remove(result.key)
        self._close_if_done(opened)

    def _commit(self, opened: _Open, answered: Answered) -> None:
        """Writes one finished answer; dropped in silence where the item has meanwhile passed to another worker."""
        owner, prefix, (result, quote_prompt, quote) = opened.owner, opened.prefix, answered
        load = (0.0, 0) if prefix.is_charged else (prefix.load_s, prefix.load_bytes)
        logprobs = None if result.logprobs is None else _logprobs(self.place.engine.prompter, result.logprobs)

        def commit(session: Session) -> bool:
            now = utc_now()
            if result.error is not None:
                fail_item(session, result.key, owner=owner, code="decode_failed", error=str(result.error), now=now)
            elif result.finish == "cancelled":
                cancel_item(session, result.key, owner=owner, now=now)
            else:
                answer = NewAnswer(
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
                )
                return answer_item(session, result.key, owner=owner, answer=answer, now=now)
            return False

        if self.place.database.retrying(commit):
            prefix.is_charged = True

    def _fail(self, opened: _Open, item_id: int, error: str) -> None:
        """Ends an item that cannot be asked."""

        def fail(session: Session) -> None:
            fail_item(session, item_id, owner=opened.owner, code="decode_failed", error=error, now=utc_now())

        self.place.database.retrying(fail)
        opened.items.remove(item_id)

    def _close_if_done(self, opened: _Open) -> None:
        if not opened.has_more and not opened.items:
            self._close(opened)

    def _close(self, opened: _Open) -> None:
        self._open.remove(opened)
        opened.leave.close()

    def _set_aside_what_is_wrong(self) -> bool:
        """Takes every open snapshot that does not prove right out of use; its items go back. False: all are right."""
        wrong = []
        for each in list(self._open):
            try:
                each.prefix.prove()
            except DAMAGED as exc:
                wrong.append(each)
                self._quarantine(each.row, exc)
            except PromptChanged:
                wrong.append(each)
                self.lost.append(each.row)
        with self.place.database.writing() as session:
            for each in wrong:
                release_items(session, each.owner)
        for each in wrong:
            self._close(each)
        return bool(wrong)

    def _quarantine(self, row: SnapshotRow, exc: Exception) -> None:
        logger.warning("snapshot is damaged", extra={"snapshot_id": row.snapshot_id, "reason": type(exc).__name__})
        with self.place.database.writing() as session:
            quarantine(session, row.snapshot_id, str(exc))
        self.lost.append(row)


def _logprobs(prompter: Prompter, tokens: tuple[TokenLogprobs, ...]) -> list[dict[str, Any]]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"id": token_id, "text": prompter.text([token_id]), "logprob": round(logprob, 6)}

    return [{**entry(token.token_id, token.logprob), "top": [entry(*each) for each in token.top]} for token in tokens]
