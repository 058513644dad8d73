"""The decode task: answers the waiting questions of one document from its snapshot."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy.orm import Session

from kernels.decode import Decoder, DecodeRequest, DecodeResult
from kernels.errors import ParamsRefused
from kernels.halving import answer_all
from kernels.kv import PrefixKV
from kernels.params import GenerationParams
from kernels.prompt import Prompter
from kernels.sampling import TokenLogprobs
from storage.database import utc_now
from storage.errors import OUTAGES, StorageError
from storage.items import (
    NewAnswer,
    OpenItem,
    answer_item,
    cancel_item,
    claim_items,
    fail_item,
    queued_items,
    release_items,
)
from storage.leases import release_leases, take_lease
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import get_snapshot, quarantine
from tasks.app import app
from tasks.errors import PromptChanged
from tasks.loading import DAMAGED, LoadedPrefix, loaded
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)


@app.task(name="platemaker.decode")  # type: ignore[untyped-decorator] # celery is untyped
def decode_snapshot(snapshot_id: int) -> None:
    """Answers every queued question of the snapshot's document. Idempotent: what is answered is not asked again."""
    place = app.require_workplace()
    place.leave_if_stopping()
    with place.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
        waiting = queued_items(session, tenant=row.tenant, document_id=row.document_id, model=place.engine.name)
    if not waiting:
        return
    if row.state != SnapshotState.READY or not answer_waiting(place, row):
        app.send_task("platemaker.prefill", args=[row.tenant, row.document_id])


def answer_waiting(place: Workplace, row: SnapshotRow) -> bool:
    """False: the snapshot is out of use, or proved damaged and now is; its items wait for a new one.

    Raises:
        WrongModel: it belongs to another model.
    """
    place.engine.check_fingerprint(row.snapshot_id, row.fields)
    owner = place.new_owner()
    with place.engine.lock, place.heartbeat.holding(owner), _leased(place, row.snapshot_id, owner) as is_ready:
        if not is_ready:
            return False
        try:
            with loaded(place, row) as prefix:
                _answer(place, row, prefix, owner)
        except DAMAGED as exc:
            logger.warning("snapshot is damaged", extra={"snapshot_id": row.snapshot_id, "reason": type(exc).__name__})
            with place.database.writing() as session:
                release_items(session, owner)
                quarantine(session, row.snapshot_id, str(exc))
            return False
        except PromptChanged:
            with place.database.writing() as session:
                release_items(session, owner)
            return False
        except OUTAGES:
            with suppress(StorageError), place.database.writing() as session:
                release_items(session, owner)
            raise
        except Exception:
            # What this owner holds comes back when its lease runs out, with the attempt counted, so that
            # questions which always fail end as failed and do not come round for ever.
            raise
        except BaseException:  # told to stop: an orderly way out, not an attempt
            with place.database.writing() as session:
                release_items(session, owner)
            raise
    return True


@contextmanager
def _leased(place: Workplace, snapshot_id: int, owner: str) -> Iterator[bool]:
    """Keeps the snapshot from the sweep inside the block. False: it is not ready any more."""
    with place.database.writing() as session:
        is_ready = take_lease(
            session,
            snapshot_id,
            owner=owner,
            now=utc_now(),
            lease_s=place.settings.lease_s,
            ttl_s=place.lifetimes.ttl_s,
        )
    try:
        yield is_ready
    finally:
        with place.database.writing() as session:
            release_leases(session, owner)


def _answer(place: Workplace, row: SnapshotRow, prefix: LoadedPrefix, owner: str) -> None:
    engine = place.engine

    def new_decoder(max_batch: int) -> Decoder:
        return Decoder(engine.model, engine.prompter, prefix.kv, max_batch=max_batch)

    def requests() -> Iterator[DecodeRequest]:
        while items := _claim(place, row, owner):
            for item in items:
                try:
                    params = GenerationParams.checked(**item.params)
                except ParamsRefused as exc:
                    _fail(place, owner, item.item_id, str(exc))
                    continue
                yield DecodeRequest(item.item_id, engine.prompter.question_ids(item.question), params)

    def is_cancelled(item_id: int) -> bool:
        place.leave_if_stopping()
        return place.heartbeat.is_cancelled(owner, item_id)

    for result in answer_all(new_decoder, requests(), is_cancelled, max_batch=engine.settings.max_batch):
        prefix.prove()
        _commit(place, row, prefix.kv, owner, result)


def _claim(place: Workplace, row: SnapshotRow, owner: str) -> list[OpenItem]:
    def claim(session: Session) -> list[OpenItem]:
        return claim_items(
            session,
            tenant=row.tenant,
            document_id=row.document_id,
            model=place.engine.name,
            owner=owner,
            limit=place.engine.settings.max_batch,
            now=utc_now(),
            lease_s=place.settings.lease_s,
        )

    return place.database.retrying(claim)


def _fail(place: Workplace, owner: str, item_id: int, error: str) -> None:
    def fail(session: Session) -> None:
        fail_item(session, item_id, owner=owner, code="decode_failed", error=error, now=utc_now())

    place.database.retrying(fail)


def _commit(place: Workplace, row: SnapshotRow, prefix: PrefixKV, owner: str, result: DecodeResult) -> None:
    """Writes one finished answer; dropped in silence where the item has meanwhile passed to another worker."""

    def commit(session: Session) -> None:
        now = utc_now()
        if result.error is not None:
            fail_item(session, result.key, owner=owner, code="decode_failed", error=str(result.error), now=now)
        elif result.finish == "cancelled":
            cancel_item(session, result.key, owner=owner, now=now)
        else:
            answer = NewAnswer(
                text=result.text,
                finish=result.finish,
                snapshot_id=row.snapshot_id,
                cached_tokens=prefix.length,
                question_tokens=result.question_tokens,
                output_tokens=len(result.token_ids),
                first_token_s=result.first_token_s,
                total_s=result.total_s,
                worker=place.worker_name,
                logprobs=None if result.logprobs is None else _logprobs(place.engine.prompter, result.logprobs),
            )
            answer_item(session, result.key, owner=owner, answer=answer, now=now)

    place.database.retrying(commit)


def _logprobs(prompter: Prompter, tokens: tuple[TokenLogprobs, ...]) -> list[dict[str, Any]]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"id": token_id, "text": prompter.text([token_id]), "logprob": round(logprob, 6)}

    return [{**entry(token.token_id, token.logprob), "top": [entry(*each) for each in token.top]} for token in tokens]
