"""Makes one document's snapshot, once, however many jobs ask for it."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import pairwise

from sqlalchemy.orm import Session

from kernels.codecs import CODECS
from kernels.fidelity import Loss, measure_loss
from kernels.kv import PrefixKV
from kernels.prefill import Prefilled, prefill
from storage.database import utc_now
from storage.errors import DatabaseUnavailable, StorageError
from storage.fingerprint import Fingerprint
from storage.manifest import CodecError, Manifest
from storage.schema import SnapshotRow
from storage.shared_breaker import PREFILL, note_failure, note_success
from storage.snapshots import WriteClaim, is_writer, publish, put_manifest
from storage.tiers import Stage
from storage.units import add_units, asked_tier
from storage.ways import DocumentKey, Way
from tasks.chain import ChunkChain
from tasks.metrics import FALLBACKS, note_prefill
from tasks.reading import begin_reading, fitting_prefix, go_on, note_found, note_ready, reading
from tasks.room import require_room_to_read
from tasks.traces import Span
from tasks.work_spans import note_read, of_waiting
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
EXACT = "none"  # what replaces a codec that loses too much


@contextmanager
def watched(place: Workplace) -> Iterator[None]:
    """Tells the breaker of the prefill pool what fails here. A document that cannot be read does not, nor does a
    database that is away, which nobody can be told of."""
    try:
        yield
    except DatabaseUnavailable:
        raise
    except Exception:
        with suppress(StorageError), place.database.writing() as session:
            if note_failure(session, PREFILL, place.settings.breaker_rule, utc_now()):
                logger.warning("the prefill pool keeps failing: its breaker is open")
        raise


def prepare_snapshot(place: Workplace, tenant: str, document_id: str) -> int | None:
    """The id of the ready snapshot; None where nothing waits for it, or another worker is at it, or it failed."""
    ids = fitting_prefix(place, tenant, document_id)
    return None if ids is None else snapshot_of(place, tenant, document_id, ids)


def snapshot_of(
    place: Workplace, tenant: str, document_id: str, ids: list[int], *, for_jobs: bool = True
) -> int | None:
    """The id of the ready snapshot of these prefix tokens, computed where it is not there; None as above. `for_jobs`:
    computing stops once no job waits for it."""
    fingerprint = place.engine.fingerprint(tenant, document_id, ids)
    key = DocumentKey(tenant, document_id)
    owner = place.new_owner()
    with place.heartbeat.holding(owner):
        begun = begin_reading(place, fingerprint, ids, owner=owner, for_jobs=for_jobs)
        if begun is None:
            return None
        if begun.claim is None:
            with of_waiting(place, "prefill", key) as span:
                span.note(way=Way.SPLIT, snapshot="found", tokens_computed=0, tokens_reused=len(ids))
                note_found(place, begun.row)
            with place.database.writing() as session:
                _ask_for_answers(session, begun.row, place.engine.name, utc_now())
            return begun.row.snapshot_id
        with reading(place, begun.row, begun.claim), of_waiting(place, "prefill", key) as span:
            span.note(way=Way.SPLIT, snapshot="computed", snapshot_id=begun.row.snapshot_id, tokens=len(ids))
            return _write(place, begun.row, begun.claim, ids, fingerprint, for_jobs, span)
    return None


def _write(
    place: Workplace,
    row: SnapshotRow,
    claim: WriteClaim,
    ids: list[int],
    fingerprint: Fingerprint,
    for_jobs: bool,
    span: Span,
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
            go_on(place, row, claim, stop, is_last=stop == len(ids), for_jobs=for_jobs)

        done = prefill(engine.model, ids, stops=chain.stops, kv=kv, on_chunk=store_chunk)
        chain.finish()
        if lossless:
            return _publish(place, row, claim, done, chain, span, loss=None)
        if kv.layout.has_state:
            chain.stored.set_state(len(ids), kv.state())
        loss = measure_loss(engine.model, ids, exact=kv, stored=chain.stored, first=(0, *chain.stops)[-2])
        if loss.logit_rel_error <= engine.settings.codec_max_error:
            return _publish(place, row, claim, done, chain, span, loss=loss)
        FALLBACKS.labels("codec_error").inc()
        logger.warning("codec loses too much, storing exactly", extra={"codec": codec, "error": loss.logit_rel_error})
        exact = ChunkChain(place, fingerprint, ids, EXACT, stored=chain.stored)
        exact.load()
        for start, stop in pairwise((0, *exact.stops)):
            exact.store(pool, kv, start, stop)
        exact.finish()
    return _publish(place, row, claim, done, exact, span, loss=None)


def _publish(
    place: Workplace,
    row: SnapshotRow,
    claim: WriteClaim,
    done: Prefilled,
    chain: ChunkChain,
    span: Span,
    *,
    loss: Loss | None,
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
    note_read(span, done)
    span.note(codec=chain.codec, bytes=sum(chunk.size_bytes for chunk in manifest.chunks), bytes_put=chain.put_bytes)
    with place.database.reading() as session:
        if not is_writer(session, claim):  # frozen meanwhile: the manifest that is there is another's
            return None
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
            put_s=chain.put_s,
            put_bytes=chain.put_bytes,
            now=now,
        )
        if published:
            note_ready(session, row, place.engine.name, now, done)
            _ask_for_answers(session, row, place.engine.name, now)
            if note_success(session, PREFILL):
                logger.info("the prefill pool works again: its breaker is closed")
    if not published:
        return None
    note_prefill(prefill_s=done.prefill_s, computed_tokens=done.computed_tokens, num_tokens=done.kv.length)
    return row.snapshot_id


def _ask_for_answers(session: Session, row: SnapshotRow, model: str, now: datetime) -> None:
    """What is asked of the document can be answered from its snapshot now."""
    tier = asked_tier(session, tenant=row.tenant, document_id=row.document_id, model=model, now=now)
    if tier is not None:
        documents = [row.document_id]
        add_units(session, Stage.ANSWER, row.tenant, documents, tier=tier, now=now, snapshot_id=row.snapshot_id)
