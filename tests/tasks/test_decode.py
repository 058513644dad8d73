import threading
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from torch import Tensor

from kernels.decode import Decoder
from kernels.model import Asked, LanguageModel
from pipeline.submit import Submission
from storage.database import utc_now
from storage.endings import cancel_job
from storage.items import NewAnswer, recover_items
from storage.job_report import job_report
from storage.manifest import chunk_object_key, manifest_object_key
from storage.objects import ObjectStore
from storage.progress import job_status
from storage.schema import (
    AnswerRow,
    ChunkRow,
    ItemRow,
    ItemState,
    QuestionRow,
    SnapshotChunkRow,
    SnapshotLeaseRow,
    SnapshotRow,
    SnapshotState,
)
from storage.snapshots import get_snapshot
from tasks import answering
from tasks.decode import answer_waiting
from tasks.errors import WrongModel
from tasks.prefill import prepare_snapshot
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]


def prepared(place: Workplace) -> SnapshotRow:
    with place.database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id)).first() or ""
    snapshot_id = prepare_snapshot(place, "default", document_id)
    assert snapshot_id is not None
    with place.database.reading() as session:
        return get_snapshot(session, snapshot_id)


def answers_of(place: Workplace, job_id: str) -> list[str | None]:
    with place.database.reading() as session:
        return [row.answer for row in job_report(session, "default", job_id)]


def test_every_question_gets_one_answer_with_its_usage(place: Workplace, submit_texts: Submit) -> None:
    submitted = submit_texts(place, TEXT, questions=10)
    row = prepared(place)

    assert not answer_waiting(place, row)

    with place.database.reading() as session:
        status = job_status(session, "default", submitted.job_id)
        answers = session.scalars(select(AnswerRow)).all()
    assert status.items == {ItemState.ANSWERED: 10}
    assert status.finished_at is not None
    assert {answer.cached_tokens for answer in answers} == {row.num_tokens}
    assert {answer.snapshot_id for answer in answers} == {row.snapshot_id}
    assert all(0 < answer.output_tokens <= 8 for answer in answers)


def test_decoding_again_changes_nothing(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    row = prepared(place)
    answer_waiting(place, row)
    with place.database.reading() as session:
        before = [(answer.item_id, answer.created_at) for answer in session.scalars(select(AnswerRow))]

    answer_waiting(place, row)

    with place.database.reading() as session:
        assert [(answer.item_id, answer.created_at) for answer in session.scalars(select(AnswerRow))] == before


def test_two_names_of_one_text_are_both_answered_from_one_prefill(place: Workplace, submit_texts: Submit) -> None:
    submitted = submit_texts(place, TEXT, TEXT)
    answer_waiting(place, prepared(place))

    with place.database.reading() as session:
        report = list(job_report(session, "default", submitted.job_id))
        snapshots = session.scalars(select(SnapshotRow)).all()
    assert [(row.source_position, row.question_position) for row in report] == [
        (s, q) for s in (0, 1) for q in range(3)
    ]
    assert [row.answer for row in report[:3]] == [row.answer for row in report[3:]]
    assert len(snapshots) == 1


def test_what_ends_in_one_step_is_written_together_before_the_next(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = submit_texts(place, TEXT, questions=5)
    row = prepared(place)
    happened: list[int | str] = []
    answer_items, ask_all = answering.answer_items, LanguageModel.ask_all

    def writing(session: Session, answers: dict[int, NewAnswer], **how: Any) -> set[int]:
        happened.append(len(answers))
        return answer_items(session, answers, **how)

    def stepping(self: LanguageModel, documents: Iterable[Asked], **how: bool) -> Tensor:
        happened.append("step")
        return ask_all(self, documents, **how)

    monkeypatch.setattr(answering, "answer_items", writing)
    monkeypatch.setattr(LanguageModel, "ask_all", stepping)

    assert not answer_waiting(place, row)

    written = [each for each in happened if each != "step"]
    assert sum(map(int, written)) == len(answers_of(place, submitted.job_id)) == 5
    assert len(written) < 5  # some end in the same step
    assert all("step" in pair for pair in pairwise(happened))


def flip(store: ObjectStore, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize("damage", ["flip a chunk", "flip the manifest", "delete a chunk", "delete the manifest"])
def test_a_damaged_snapshot_is_never_answered_from(place: Workplace, submit_texts: Submit, damage: str) -> None:
    submitted = submit_texts(place, TEXT)
    row = prepared(place)
    answer_waiting(place, row)
    right = answers_of(place, submitted.job_id)
    again = submit_texts(place, TEXT)
    with place.database.reading() as session:
        chunk = session.scalars(select(ChunkRow)).first()
    assert chunk is not None
    manifest = manifest_object_key(row.tenant, row.document_id, row.fingerprint)
    key = manifest if "manifest" in damage else chunk_object_key(chunk.chunk_key)
    if damage.startswith("flip"):
        flip(place.store, key)
    else:
        place.store.delete(key)

    assert answer_waiting(place, row)

    assert answers_of(place, again.job_id) == [None, None, None]
    with place.database.reading() as session:
        assert get_snapshot(session, row.snapshot_id).state == SnapshotState.QUARANTINED
    assert not answer_waiting(place, prepared(place))
    assert answers_of(place, again.job_id) == right


def test_a_snapshot_of_another_model_is_refused(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    row = prepared(place)
    with place.database.writing() as session:
        fields = {**row.fields, "weights": "0" * 64}
        session.execute(update(SnapshotRow).values(fields=fields))
    with place.database.reading() as session:
        row = get_snapshot(session, row.snapshot_id)

    with pytest.raises(WrongModel, match="weights"):
        answer_waiting(place, row)


def test_cancelling_keeps_what_is_answered_and_ends_the_rest(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = submit_texts(place, TEXT, questions=12, max_new_tokens=200)
    row = prepared(place)
    step = Decoder._step

    def slow_step(self: Decoder) -> object:
        time.sleep(0.02)
        return step(self)

    monkeypatch.setattr(Decoder, "_step", slow_step)
    worker = threading.Thread(target=answer_waiting, args=(place, row))
    worker.start()
    time.sleep(0.5)
    with place.database.writing() as session:
        cancel_job(session, "default", submitted.job_id, utc_now())
    worker.join(timeout=30)

    with place.database.reading() as session:
        status = job_status(session, "default", submitted.job_id)
    assert not worker.is_alive()
    assert status.finished_at is not None
    assert set(status.items) <= {ItemState.ANSWERED, ItemState.CANCELLED}
    assert status.items[ItemState.CANCELLED] > 0


def test_a_worker_told_to_stop_gives_its_items_back_at_once(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_texts(place, TEXT, questions=6)
    row = prepared(place)

    def stopped(self: Decoder) -> object:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_step", stopped)
        with pytest.raises(SystemExit):
            answer_waiting(place, row)

    with place.database.reading() as session:
        items = session.scalars(select(ItemRow)).all()
    assert {(item.state, item.attempts, item.owner) for item in items} == {(ItemState.QUEUED, 0, None)}


def test_items_of_a_failing_worker_come_back_and_are_set_aside_in_the_end(
    open_place: Callable[..., Workplace], submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(lease_s=0.2)
    submitted = submit_texts(place, TEXT)
    row = prepared(place)

    def burst(self: Decoder) -> object:
        raise RuntimeError("a surprise")

    monkeypatch.setattr(Decoder, "_step", burst)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            answer_waiting(place, row)
        time.sleep(0.25)
        with place.database.writing() as session:
            recover_items(session, now=utc_now(), max_attempts=3)

    with place.database.reading() as session:
        status = job_status(session, "default", submitted.job_id)
        errors = set(session.scalars(select(ItemRow.error)))
    assert status.items == {ItemState.FAILED: 3}
    assert all(error and "3 times" in error for error in errors)


def test_a_store_that_damages_everything_ends_the_document_and_not_the_worker(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = submit_texts(place, TEXT)
    read_into = place.store.read_into
    monkeypatch.setattr(place.store, "read_into", lambda key, start, into: read_into(key, start, into) - 1)

    for _ in range(place.settings.max_attempts):
        assert answer_waiting(place, prepared(place))
    with place.database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id)).first() or ""
    assert prepare_snapshot(place, "default", document_id) is None

    with place.database.reading() as session:
        status = job_status(session, "default", submitted.job_id)
    assert status.items == {ItemState.FAILED: 3}


def prepared_all(place: Workplace) -> list[SnapshotRow]:
    with place.database.reading() as session:
        waiting = select(ItemRow.document_id).where(ItemRow.state == ItemState.QUEUED).order_by(ItemRow.item_id)
        documents = dict.fromkeys(session.scalars(waiting))
    snapshot_ids = [prepare_snapshot(place, "default", document) for document in documents]
    with place.database.reading() as session:
        return [get_snapshot(session, snapshot_id or 0) for snapshot_id in snapshot_ids]


def test_other_documents_that_wait_are_answered_in_the_same_batch(
    open_place: Callable[..., Workplace], submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(memory_cache_mb=64)
    texts = [TEXT[: len(TEXT) - 60 * n] for n in range(3)]
    alone = []
    for text in texts:
        submitted = submit_texts(place, text, questions=2)
        assert not answer_waiting(place, prepared_all(place)[-1])
        alone += answers_of(place, submitted.job_id)
    together = submit_texts(place, *texts, questions=2)
    rows = prepared_all(place)
    sizes = []
    ask_all = LanguageModel.ask_all

    def watched(self: LanguageModel, documents: Iterable[Asked], **how: bool) -> Tensor:
        asked = list(documents)
        sizes.append(len(asked))
        return ask_all(self, asked, **how)

    monkeypatch.setattr(LanguageModel, "ask_all", watched)

    assert not answer_waiting(place, rows[0])

    assert answers_of(place, together.job_id) == alone
    assert max(sizes) == 2  # four questions at once, two of each document
    with place.database.reading() as session:
        assert not session.scalars(select(SnapshotLeaseRow)).all()


def test_a_damaged_document_is_put_aside_and_the_others_are_answered(
    open_place: Callable[..., Workplace], submit_texts: Submit
) -> None:
    place = open_place(memory_cache_mb=64)
    submitted = submit_texts(place, TEXT, TEXT[:-60], questions=2)
    first, second = prepared_all(place)
    with place.database.reading() as session:
        keys = [
            set(session.scalars(select(SnapshotChunkRow.chunk_key).where(SnapshotChunkRow.snapshot_id == snapshot_id)))
            for snapshot_id in (first.snapshot_id, second.snapshot_id)
        ]
    flip(place.store, chunk_object_key((keys[1] - keys[0]).pop()))

    assert [row.snapshot_id for row in answer_waiting(place, first)] == [second.snapshot_id]

    with place.database.reading() as session:
        status = job_status(session, "default", submitted.job_id)
        assert get_snapshot(session, second.snapshot_id).state == SnapshotState.QUARANTINED
        assert {item.attempts for item in session.scalars(select(ItemRow)) if item.state == ItemState.QUEUED} == {0}
    assert status.items == {ItemState.ANSWERED: 2, ItemState.QUEUED: 2}


def test_a_task_ends_after_so_many_documents(open_place: Callable[..., Workplace], submit_texts: Submit) -> None:
    place = open_place(memory_cache_mb=64, documents_per_task=2)
    submitted = submit_texts(place, *(TEXT[: len(TEXT) - 60 * n] for n in range(3)), questions=1)

    assert not answer_waiting(place, prepared_all(place)[0])

    with place.database.reading() as session:
        assert job_status(session, "default", submitted.job_id).items == {ItemState.ANSWERED: 2, ItemState.QUEUED: 1}


def test_nothing_is_answered_beside_a_document_that_a_worker_died_on(
    open_place: Callable[..., Workplace], submit_texts: Submit
) -> None:
    place = open_place(memory_cache_mb=64)
    job_id = submit_texts(place, *(TEXT[: len(TEXT) - 60 * n] for n in range(4)), questions=1).job_id
    rows = prepared_all(place)
    with place.database.writing() as session:
        for row in rows[1:3]:
            session.execute(update(ItemRow).where(ItemRow.document_id == row.document_id).values(attempts=1))

    def states() -> list[str]:
        with place.database.reading() as session:
            return [row.state for row in job_report(session, "default", job_id)]

    assert not answer_waiting(place, rows[1])  # alone
    assert states() == ["queued", "answered", "queued", "queued"]
    assert not answer_waiting(place, rows[0])  # with the last one
    assert states() == ["answered", "answered", "queued", "answered"]


def cramped(monkeypatch: pytest.MonkeyPatch, room: int) -> list[int]:
    """The model runs out of memory where more questions than `room` are asked at once; returns how many were."""
    honest, asked = LanguageModel.ask_all, []

    def ask_all(self: LanguageModel, documents: Iterable[Asked], **how: bool) -> Tensor:
        documents = list(documents)
        asked.append(sum(len(document.pending) for document in documents))
        if asked[-1] > room:
            raise MemoryError
        return honest(self, documents, **how)

    monkeypatch.setattr(LanguageModel, "ask_all", ask_all)
    return asked


def test_where_memory_runs_out_fewer_questions_are_answered_at_a_time(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = submit_texts(place, TEXT, questions=5, temperature=1.0)
    row = prepared(place)
    answer_waiting(place, row)
    again = submit_texts(place, TEXT, questions=5, temperature=1.0)
    asked = cramped(monkeypatch, room=1)

    assert not answer_waiting(place, row)

    assert answers_of(place, again.job_id) == answers_of(place, first.job_id)
    assert asked[:3] == [4, 2, 1]
    with place.database.reading() as session:
        assert {item.attempts for item in session.scalars(select(ItemRow))} == {1}


def test_where_memory_does_not_do_for_one_question_it_fails_and_the_worker_lives(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = submit_texts(place, TEXT, questions=2)
    row = prepared(place)
    answer_waiting(place, row)  # with its probe
    again = submit_texts(place, TEXT, questions=2)

    with monkeypatch.context() as patch:
        cramped(patch, room=0)
        assert not answer_waiting(place, row)

    with place.database.reading() as session:
        report = list(job_report(session, "default", again.job_id))
    assert {row.state for row in report} == {ItemState.FAILED}
    assert all(row.error and "not enough memory for this question alone" in row.error for row in report)
    later = submit_texts(place, TEXT, questions=2)
    assert not answer_waiting(place, row)
    assert answers_of(place, later.job_id) == answers_of(place, submitted.job_id)


def test_what_cannot_be_generated_fails_its_item_and_no_other(place: Workplace, submit_texts: Submit) -> None:
    """Such rows come from another version, or hold what only the worker's library knows."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"top_p": 7}, "top_p: Input should be less than or equal to 1"),
        ({"from_tomorrow": 1}, "from_tomorrow: Unexpected keyword argument"),
        ({"regex": "(?=a)"}, "The answer's regex cannot be used: look-around"),
    ]
    submitted = submit_texts(place, TEXT, questions=4)
    with place.database.writing() as session:
        for row in session.scalars(select(QuestionRow).where(QuestionRow.position < len(wrong))):
            row.params = {**row.params, **wrong[row.position][0]}

    assert not answer_waiting(place, prepared(place))

    with place.database.reading() as session:
        report = list(job_report(session, "default", submitted.job_id))
    assert [row.state for row in report] == [ItemState.FAILED] * 3 + [ItemState.ANSWERED]
    for row, (_, sentence) in zip(report, wrong, strict=False):
        assert row.error is not None and sentence in row.error


def test_answers_keep_their_logprobs_where_they_were_asked_for(place: Workplace, submit_texts: Submit) -> None:
    plain = submit_texts(place, TEXT, questions=1)
    asking = submit_texts(place, TEXT, questions=1, logprobs=2)
    answer_waiting(place, prepared(place))

    with place.database.reading() as session:
        (without,), (row,) = (list(job_report(session, "default", job.job_id)) for job in (plain, asking))
    assert without.logprobs is None
    assert row.logprobs is not None and len(row.logprobs) == row.output_tokens
    for token in row.logprobs:
        assert token["logprob"] <= 0 and len(token["top"]) == 2
        assert token["top"][0] == {key: token[key] for key in ("id", "text", "logprob")}  # greedy


def test_answers_have_the_form_their_questions_ask_for(place: Workplace, submit_texts: Submit) -> None:
    submitted = submit_texts(place, TEXT, choices=("Yes", "No", "größer"), max_new_tokens=20)

    answer_waiting(place, prepared(place))

    assert set(answers_of(place, submitted.job_id)) <= {"Yes", "No", "größer"}
