"""The prefill task: makes one document's snapshot, once, however many jobs ask for it."""

import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from kernels.codecs import CODECS
from kernels.errors import ContextExceeded, KernelError
from kernels.fidelity import Loss, measure_loss
from kernels.kv import PrefixKV
from kernels.prefill import Prefilled, prefill
from storage.carrying import carry_answers
from storage.database import utc_now
from storage.documents import get_text
from storage.errors import OUTAGES, ObjectMissing, StorageError
from storage.fingerprint import Fingerprint
from storage.items import end_readings, fail_document_items, fail_item, is_wanted, queued_items
from storage.manifest import CodecError, Manifest
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import (
    WriteClaim,
    abandon_writing,
    claim_writing,
    find_or_create,
    note_progress,
    note_readings,
    publish,
    put_manifest,
)
from tasks.app import app
from tasks.chain import ChunkChain
from tasks.errors import Unwanted
from tasks.metrics import FALLBACKS, RETRIES, note_prefill, note_snapshot
from tasks.progress import send_progress
from tasks.room import require_room_to_read
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
EXACT = "none"  # what replaces a codec that loses too much


@app.task(name="platemaker.prefill")  # type: ignore[untyped-decorator] # celery is untyped
def prefill_document(tenant: str, document_id: str) -> None:
    """Makes sure the document's snapshot is ready for the items that wait for it, then calls decode. Idempotent."""
    place = app.require_workplace()
    place.leave_if_draining()
    snapshot_id = prepare_snapshot(place, tenant, document_id)
    if snapshot_id is not None:
        app.send_task("platemaker.decode", args=[snapshot_id])


def prepare_snapshot(place: Workplace, tenant: str, document_id: str) -> int | None:
    """The id of the ready snapshot; None where nothing waits for it, or another worker is at it, or it failed."""
    ids = _fitting_prefix(place, tenant, document_id)
    return None if ids is None else snapshot_of(place, tenant, document_id, ids)


def snapshot_of(
    place: Workplace, tenant: str, document_id: str, ids: list[int], *, for_jobs: bool = True
) -> int | None:
    """The id of the ready snapshot of these prefix tokens, computed where it is not there; None as above. `for_jobs`:
    computing stops once no job waits for it."""
    engine = place.engine
    fingerprint = engine.fingerprint(tenant, document_id, ids)
    owner = place.new_owner()
    with place.heartbeat.holding(owner):
        with place.database.writing() as session:
            now = utc_now()
            of_document = {"tenant": tenant, "document_id": document_id, "model": engine.name}
            carried = carry_answers(session, **of_document, fingerprint=fingerprint.digest(), now=now)
            if for_jobs and carried and not is_wanted(session, **of_document, now=now):
                return None
            row = find_or_create(session, fingerprint, num_tokens=len(ids), now=now)
            if row.state == SnapshotState.READY:
                note_snapshot(miss=None)
                note_readings(session, row, model=engine.name, computed_tokens=0, prefill_s=0.0, now=now)
                end_readings(session, **of_document, now=now)
                send_progress(document_id=document_id, tokens=len(ids), snapshot="hit")
                return row.snapshot_id
            miss = _why(row)
            claim = claim_writing(session, row.snapshot_id, owner=owner, now=now, lease_s=place.settings.lease_s)
        if claim is None:
            return None
        note_snapshot(miss=miss)
        if claim.attempt > 1:
            RETRIES.labels("prefill").inc()
        send_progress(document_id=document_id, tokens=len(ids), snapshot="miss")
        if claim.attempt > place.settings.max_attempts:
            _give_up(place, row, claim, f"Reading this document failed {claim.attempt - 1} times; it is set aside.")
            return None
        try:
            return _write(place, row, claim, ids, fingerprint, for_jobs)
        except Unwanted as exc:
            logger.info("prefill stopped: no job waits for it", extra={"document_id": exc.document_id})
            with place.database.writing() as session:
                abandon_writing(session, claim, state=SnapshotState.WRITING, error=None, is_attempt=False)
            return None
        except KernelError as exc:
            _give_up(place, row, claim, str(exc))
            return None
        except BaseException as exc:
            # Neither an outage nor being told to stop is the document's fault.
            is_attempt = isinstance(exc, Exception) and not isinstance(exc, OUTAGES)
            with place.database.writing() as session:
                abandon_writing(session, claim, state=SnapshotState.WRITING, error=None, is_attempt=is_attempt)
            raise


def _fitting_prefix(place: Workplace, tenant: str, document_id: str) -> list[int] | None:
    """The prefix's tokens, if an item waits whose question and answer fit behind them; the others are refused.

    No weight is loaded for this, so a document that is too long costs nothing.
    """
    engine = place.engine
    of_document = {"tenant": tenant, "document_id": document_id, "model": engine.name}
    with place.database.reading() as session:
        items = queued_items(session, **of_document)
        if not is_wanted(session, **of_document, now=utc_now()):
            return None
    try:
        text = get_text(place.store, tenant, document_id)
    except ObjectMissing:
        with place.database.writing() as session:
            fail_document_items(
                session,
                **of_document,
                code="text_missing",
                error="The text of this document is not stored any more. Submit its file again.",
                now=utc_now(),
            )
        return None
    ids = engine.prompter.prefix_ids(text)
    if len(ids) >= engine.context_len:
        error = _too_long(len(ids) + 1, engine.context_len)
        with place.database.writing() as session:
            fail_document_items(session, **of_document, code="too_long", error=error, now=utc_now())
        return None
    refused = {}
    for item in items:
        needed = len(ids) + len(engine.prompter.question_ids(item.question)) + int(item.params["max_new_tokens"])
        if needed > engine.context_len:
            refused[item.item_id] = _too_long(needed, engine.context_len)
    if not refused:
        return ids
    with place.database.writing() as session:
        for item_id, error in refused.items():
            fail_item(session, item_id, owner=None, code="too_long", error=error, now=utc_now())
        return ids if is_wanted(session, **of_document, now=utc_now()) else None


def _too_long(needed: int, context_len: int) -> str:
    return f"{ContextExceeded(needed, context_len)} Or submit it with --split sections: it is then read in several."


def _write(
    place: Workplace, row: SnapshotRow, claim: WriteClaim, ids: list[int], fingerprint: Fingerprint, for_jobs: bool
) -> int | None:
    """A lossy codec's stored chunks are read again only for their answers, never to compute on behind them: what is
    measured against is then exact, and so is what is stored where the codec loses too much."""
    engine = place.engine
    require_room_to_read(place, len(ids))
    kv = engine.model.new_kv(len(ids), make_room=place.residents.make_room)
    codec = engine.settings.codec
    lossless = CODECS[codec].lossless
    chain = ChunkChain(place, fingerprint, ids, codec, stored=kv if lossless else engine.model.new_kv(len(ids)))
    chain.load()
    with ThreadPoolExecutor(1, thread_name_prefix="store") as pool, engine.lock:

        def store_chunk(kv: PrefixKV, start: int, stop: int) -> None:
            place.leave_if_stopping()
            chain.store(pool, kv, start, stop)
            with place.database.writing() as session:
                note_progress(session, claim, stop)
                wanted = not for_jobs or is_wanted(
                    session, tenant=row.tenant, document_id=row.document_id, model=engine.name, now=utc_now()
                )
            if stop < len(ids):  # else it is as good as done
                if not wanted:
                    raise Unwanted(row.document_id)
                place.leave_if_draining()

        done = prefill(engine.model, ids, stops=chain.stops, kv=kv, on_chunk=store_chunk)
        chain.finish()
        if lossless:
            return _publish(place, row, claim, done, chain, loss=None)
        if kv.layout.has_state:
            chain.stored.set_state(len(ids), kv.state())
        loss = measure_loss(engine.model, ids, exact=kv, stored=chain.stored, first=(0, *chain.stops)[-2])
        if loss.logit_rel_error <= engine.settings.codec_max_error:
            return _publish(place, row, claim, done, chain, loss=loss)
        FALLBACKS.labels("codec_error").inc()
        logger.warning("codec loses too much, storing exactly", extra={"codec": codec, "error": loss.logit_rel_error})
        exact = ChunkChain(place, fingerprint, ids, EXACT, stored=chain.stored)
        exact.load()
        for start, stop in pairwise((0, *exact.stops)):
            exact.store(pool, kv, start, stop)
        exact.finish()
    return _publish(place, row, claim, done, exact, loss=None)


def _publish(
    place: Workplace, row: SnapshotRow, claim: WriteClaim, done: Prefilled, chain: ChunkChain, *, loss: Loss | None
) -> int | None:
    probe = done.probe if loss is None else loss.probe
    manifest = Manifest(
        fingerprint=row.fields,
        num_tokens=done.kv.length,
        num_layers=done.kv.num_layers,
        chunks=chain.finish(),
        codec=chain.codec,
        states=chain.states,
        probe_token_ids=probe.token_ids,
        probe_logits=probe.logits,
        producer=place.engine.producer,
        codec_error=None
        if loss is None
        else CodecError(logit_rel_error=loss.logit_rel_error, top1_agreement=loss.top1_agreement),
    )
    digest = put_manifest(place.store, row, manifest)
    now = utc_now()
    with place.database.writing() as session:
        published = publish(
            session,
            claim,
            manifest,
            manifest_sha256=digest,
            computed_tokens=done.computed_tokens,
            prefill_s=done.prefill_s,
            now=now,
        )
        if published:
            note_readings(
                session,
                row,
                model=place.engine.name,
                computed_tokens=done.computed_tokens,
                prefill_s=done.prefill_s,
                now=now,
            )
            end_readings(session, tenant=row.tenant, document_id=row.document_id, model=place.engine.name, now=now)
    if not published:
        return None
    note_prefill(prefill_s=done.prefill_s, computed_tokens=done.computed_tokens, num_tokens=done.kv.length)
    return row.snapshot_id


def _why(row: SnapshotRow) -> str:
    """Why a snapshot has to be made, from its row as it was found."""
    if row.state == SnapshotState.WRITING:
        return "unfinished" if row.attempts else "new"
    return str(row.state)


def _give_up(place: Workplace, row: SnapshotRow, claim: WriteClaim, reason: str) -> None:
    """Fails the document's waiting items; the next job that asks for the document may try again."""
    try:
        with place.database.writing() as session:
            abandon_writing(session, claim, state=SnapshotState.FAILED, error=reason)
            fail_document_items(
                session,
                tenant=row.tenant,
                document_id=row.document_id,
                model=place.engine.name,
                code="prefill_failed",
                error=reason,
                now=utc_now(),
            )
    except StorageError:
        logger.warning("giving up a snapshot failed", extra={"snapshot_id": row.snapshot_id})
        raise
