"""What tasks do when a job ends, waits, or was answered before, and when their process is told to stop."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import func, select

import tasks.answering
import tasks.reading
from kernels.decode import Decoder, DecodeRequest, DecodeResult
from pipeline.submit import Submission
from storage.database import utc_now
from storage.endings import cancel_job
from storage.job_report import job_report
from storage.progress import job_status
from storage.schema import ItemRow, ItemState, SnapshotRow, SnapshotState
from storage.snapshots import get_snapshot
from tasks.chain import ChunkChain
from tasks.decode import answer_waiting
from tasks.prefill import prepare_snapshot
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]


def document_of(place: Workplace, job_id: str) -> str:
    with place.database.reading() as session:
        return str(session.scalars(select(ItemRow.document_id).where(ItemRow.job_id == job_id)).first())


def prepare(place: Workplace, job_id: str) -> int | None:
    return prepare_snapshot(place, "default", document_of(place, job_id))


def answer(place: Workplace, snapshot_id: int | None) -> None:
    assert snapshot_id is not None
    with place.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
    assert answer_waiting(place, row) == []


def after_first_chunk(monkeypatch: pytest.MonkeyPatch, event: Callable[[], None]) -> list[int]:
    """Lets something happen when the first chunk is stored; the list holds the stops that were stored."""
    stored: list[int] = []
    store = ChunkChain.store

    def watched(self: ChunkChain, pool: Any, kv: Any, start: int, stop: int) -> None:
        store(self, pool, kv, start, stop)
        stored.append(stop)
        if len(stored) == 1:
            event()

    monkeypatch.setattr(ChunkChain, "store", watched)
    return stored


def test_a_prefill_that_no_job_wants_any_more_stops_behind_a_chunk_and_is_no_attempt(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit_texts(place, TEXT).job_id

    def cancel() -> None:
        with place.database.writing() as session:
            cancel_job(session, "default", job_id, utc_now())

    stored = after_first_chunk(monkeypatch, cancel)

    assert prepare(place, job_id) is None
    with place.database.reading() as session:
        row = session.scalars(select(SnapshotRow)).one()
        assert job_status(session, "default", job_id).items == {ItemState.CANCELLED: 3}
    assert (row.state, row.owner, row.attempts) == (SnapshotState.WRITING, None, 0)
    assert len(stored) == 1 < len(place.engine.chunk_stops(row.num_tokens))


def test_a_prefill_that_another_job_wants_goes_on(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, kept = submit_texts(place, TEXT).job_id, submit_texts(place, TEXT).job_id

    def cancel() -> None:
        with place.database.writing() as session:
            cancel_job(session, "default", cancelled, utc_now())

    after_first_chunk(monkeypatch, cancel)

    answer(place, prepare(place, kept))
    with place.database.reading() as session:
        assert job_status(session, "default", kept).items == {ItemState.ANSWERED: 3}


def test_a_draining_prefill_stops_behind_a_chunk_and_the_next_goes_on_behind_it(
    open_place: Callable[..., Workplace], submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_place(), open_place()
    job_id = submit_texts(first, TEXT).job_id

    with monkeypatch.context() as patch:
        stored = after_first_chunk(patch, first.drain)
        with pytest.raises(SystemExit):
            prepare(first, job_id)

    assert len(stored) == 1 and not first.stopping.is_set()
    snapshot_id = prepare(second, job_id)
    assert snapshot_id is not None
    with second.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
    assert row.computed_tokens == row.num_tokens - stored[0]


def test_a_draining_decode_answers_what_is_begun_and_gives_the_rest_back_at_once(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit_texts(place, TEXT, questions=9).job_id
    snapshot_id = prepare(place, job_id)
    assert snapshot_id is not None
    step, begun, held = Decoder._step, [], []

    def drained(*values: Any) -> DecodeRequest:
        begun.append(values)
        if len(begun) == 2:  # the third of the four that are claimed finds the worker draining
            place.drain()
        return DecodeRequest(*values)

    def watched(self: Decoder) -> Iterator[DecodeResult]:
        with place.database.reading() as session:
            held.append(session.scalar(select(func.count()).where(ItemRow.state == ItemState.RUNNING)))
        yield from step(self)

    monkeypatch.setattr(tasks.answering, "DecodeRequest", drained)
    monkeypatch.setattr(Decoder, "_step", watched)

    with pytest.raises(SystemExit):
        answer(place, snapshot_id)

    assert held[0] == 2
    with place.database.reading() as session:
        assert job_status(session, "default", job_id).items == {ItemState.ANSWERED: 2, ItemState.QUEUED: 7}
        assert set(session.scalars(select(ItemRow.attempts).where(ItemRow.state == ItemState.QUEUED))) == {0}


def test_a_worker_told_to_stop_drains_and_told_again_ends(open_place: Callable[..., Workplace]) -> None:
    place = open_place(soft_stop_s=600)
    assert place.may_claim()

    place.drain()
    assert not place.may_claim() and not place.stopping.is_set()
    place.leave_if_stopping()
    with pytest.raises(SystemExit):
        place.leave_if_draining()

    place.drain()
    with pytest.raises(SystemExit):
        place.leave_if_stopping()


def test_draining_ends_by_itself(open_place: Callable[..., Workplace]) -> None:
    place = open_place(soft_stop_s=0.01)

    place.drain()

    assert place.stopping.wait(60)


def test_documents_are_read_before_their_questions_come(place: Workplace, submit_texts: Submit) -> None:
    early = submit_texts(place, TEXT, questions=0, only_prefill=True).job_id
    snapshot_id = prepare(place, early)
    with place.database.reading() as session:
        assert job_status(session, "default", early).finished_at is not None

    later = submit_texts(place, TEXT).job_id

    assert prepare(place, later) == snapshot_id
    answer(place, snapshot_id)
    with place.database.reading() as session:
        assert job_status(session, "default", later).items == {ItemState.ANSWERED: 3}


def test_a_document_that_only_is_read_and_is_too_long_says_so(place: Workplace, submit_texts: Submit) -> None:
    job_id = submit_texts(place, TEXT * 9, questions=0, only_prefill=True).job_id

    assert prepare(place, job_id) is None

    with place.database.reading() as session:
        assert job_status(session, "default", job_id).items == {ItemState.FAILED: 1}
        assert session.scalars(select(ItemRow.error_code)).one() == "too_long"


def test_what_was_answered_before_is_carried_over_and_only_the_rest_is_asked(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = submit_texts(place, TEXT, questions=2).job_id
    answer(place, prepare(place, first))
    same = submit_texts(place, TEXT, questions=2, reuse_answers=True).job_id
    monkeypatch.setattr(tasks.reading, "find_or_create", lambda *_, **__: pytest.fail("nothing is to be read"))
    assert prepare(place, same) is None
    monkeypatch.undo()

    more = submit_texts(place, TEXT, questions=3, reuse_answers=True).job_id
    answer(place, prepare(place, more))

    with place.database.reading() as session:
        given = [row.answer for row in job_report(session, "default", first)]
        assert [row.answer for row in job_report(session, "default", same)] == given
        assert [row.answer for row in job_report(session, "default", more)][:2] == given
        assert job_status(session, "default", more).items == {ItemState.ANSWERED: 3}
        carried = [row.carried_from for job_id in (first, same, more) for row in job_report(session, "default", job_id)]
    assert [at is not None for at in carried] == [False] * 2 + [True] * 2 + [True] * 2 + [False]
