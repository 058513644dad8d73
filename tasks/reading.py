"""The right to read a document, and what becomes of it: for who makes its snapshot, and for who answers at once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import NamedTuple

from sqlalchemy.orm import Session

from kernels.errors import ContextExceeded, KernelError
from kernels.prefill import Prefilled
from storage.carrying import carry_answers
from storage.database import utc_now
from storage.errors import OUTAGES, ObjectMissing, StorageError
from storage.fingerprint import Fingerprint
from storage.items import end_readings, fail_document_items, fail_item, is_wanted, queued_items
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import (
    WriteClaim,
    abandon_writing,
    claim_writing,
    find_or_create,
    note_progress,
    note_readings,
)
from tasks.errors import Unwanted
from tasks.metrics import RETRIES, note_snapshot
from tasks.progress import send_progress
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)


class Begun(NamedTuple):
    """`claim` None: the snapshot is ready, and nobody need read the document."""

    row: SnapshotRow
    claim: WriteClaim | None


def fitting_prefix(place: Workplace, tenant: str, document_id: str) -> list[int] | None:
    """The prefix's tokens, if an item waits whose question and answer fit behind them; the others are refused.

    No weight is loaded for this, so a document that is too long costs nothing.

    Raises:
        StorageError: its text cannot be had now.
    """
    engine = place.engine
    of_document = {"tenant": tenant, "document_id": document_id, "model": engine.name}
    with place.database.reading() as session:
        items = queued_items(session, **of_document)
        if not is_wanted(session, **of_document, now=utc_now()):
            return None
    try:
        text = place.text(tenant, document_id)
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


def begin_reading(
    place: Workplace, fingerprint: Fingerprint, ids: list[int], *, owner: str, for_jobs: bool = True
) -> Begun | None:
    """Takes over what was answered before, then claims the document's snapshot for `owner`. None: nothing waits any
    more, or another worker is at it, or it was tried too often and is set aside now."""
    engine = place.engine
    of_document = {"tenant": fingerprint.tenant, "document_id": fingerprint.document_id, "model": engine.name}
    with place.database.writing() as session:
        now = utc_now()
        carried = carry_answers(session, **of_document, fingerprint=fingerprint.digest(), now=now)
        if for_jobs and carried and not is_wanted(session, **of_document, now=now):
            return None
        row = find_or_create(session, fingerprint, num_tokens=len(ids), now=now)
        if row.state == SnapshotState.READY:
            return Begun(row, None)
        miss = _why(row)
        claim = claim_writing(session, row.snapshot_id, owner=owner, now=now, lease_s=place.settings.lease_s)
    if claim is None:
        return None
    note_snapshot(miss=miss)
    if claim.attempt > 1:
        RETRIES.labels("prefill").inc()
    send_progress(document_id=row.document_id, tokens=len(ids), snapshot="miss")
    if claim.attempt > place.settings.max_attempts:
        _give_up(place, row, claim, f"Reading this document failed {claim.attempt - 1} times; it is set aside.")
        return None
    return Begun(row, claim)


def note_found(place: Workplace, row: SnapshotRow) -> None:
    """The document's snapshot was ready, for the jobs that wait for it."""
    note_snapshot(miss=None)
    with place.database.writing() as session:
        note_ready(session, row, place.engine.name, utc_now())
    send_progress(document_id=row.document_id, tokens=row.num_tokens, snapshot="hit")


def note_ready(session: Session, row: SnapshotRow, model: str, now: datetime, done: Prefilled | None = None) -> None:
    """For the jobs that wait: the snapshot is ready, computed just now or (None) found."""
    computed_tokens, prefill_s = (0, 0.0) if done is None else (done.computed_tokens, done.prefill_s)
    note_readings(session, row, model=model, computed_tokens=computed_tokens, prefill_s=prefill_s, now=now)
    end_readings(session, tenant=row.tenant, document_id=row.document_id, model=model, now=now)


@contextmanager
def reading(place: Workplace, row: SnapshotRow, claim: WriteClaim | None) -> Iterator[None]:
    """Lets the snapshot go, where it is claimed, when reading ends early. A document that cannot be read, or that
    nobody wants any more, is no error of whoever reads it: the block then ends in silence."""
    try:
        yield
    except Unwanted as exc:
        logger.info("prefill stopped: no job waits for it", extra={"document_id": exc.document_id})
        release_reading(place, claim)
    except KernelError as exc:
        _give_up(place, row, claim, str(exc))
    except BaseException as exc:
        # Neither an outage nor being told to stop is the document's fault.
        is_attempt = isinstance(exc, Exception) and not isinstance(exc, OUTAGES)
        release_reading(place, claim, is_attempt=is_attempt)
        raise


def release_reading(place: Workplace, claim: WriteClaim | None, *, is_attempt: bool = False) -> None:
    """The next who wants the snapshot may make it."""
    if claim is None:
        return
    with place.database.writing() as session:
        abandon_writing(session, claim, state=SnapshotState.WRITING, error=None, is_attempt=is_attempt)


def go_on(
    place: Workplace,
    row: SnapshotRow,
    claim: WriteClaim | None,
    done_tokens: int,
    *,
    is_last: bool,
    for_jobs: bool = True,
) -> None:
    """Between two chunks: notes how far it is, and ends what is of no use any more.

    Raises:
        Unwanted: no job waits for it.
        SystemExit: this process has been told to stop.
    """
    with place.database.writing() as session:
        if claim is not None:
            note_progress(session, claim, done_tokens)
        wanted = not for_jobs or is_wanted(
            session, tenant=row.tenant, document_id=row.document_id, model=place.engine.name, now=utc_now()
        )
    if not is_last:  # else it is as good as done
        if not wanted:
            raise Unwanted(row.document_id)
        place.leave_if_draining()


def _why(row: SnapshotRow) -> str:
    """Why a snapshot has to be made, from its row as it was found."""
    if row.state == SnapshotState.WRITING:
        return "unfinished" if row.attempts else "new"
    return str(row.state)


def _give_up(place: Workplace, row: SnapshotRow, claim: WriteClaim | None, reason: str) -> None:
    """Fails the document's waiting items; the next job that asks for the document may try again."""
    try:
        with place.database.writing() as session:
            if claim is not None:
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
