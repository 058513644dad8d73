"""Who answers has read the document: the same answers, shared costs, nothing stored, and never read twice at once."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from kernels.errors import MemoryExceeded, NonFiniteLogits
from pipeline.submit import Submission
from storage.charge_by import ChargeBy
from storage.charges import usage
from storage.database import utc_now
from storage.errors import StoreUnavailable
from storage.forget import forget_document
from storage.job_report import ReportRow, job_report
from storage.schema import AnswerRow, BreakerRow, ItemRow, ItemState, JobRow, ReadingRow, SnapshotRow, SnapshotState
from storage.shared_breaker import PREFILL, breaker_state
from storage.tiers import Stage, Tier
from storage.units import add_units
from storage.ways import Choice, DocumentKey, Mode, Way, Why
from tasks import one_piece
from tasks.app import app, configure
from tasks.decode import answer_waiting
from tasks.hints import answer_document, decode_snapshot, prefill_document
from tasks.prefill import prepare_snapshot
from tasks.queues import Duty, Pool
from tasks.residents import unstored_key
from tasks.settings import TaskSettings
from tasks.turns import Turns
from tasks.upkeep import Upkeep, kick_waiting
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]
FALLBACK = Choice(Way.FALLBACK, Why.NO_PREFILL_POOL)
OTHER_TEXT = TEXT.replace("Supplier", "Purchaser")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Messages that would go to the queues."""
    configure(TaskSettings())
    messages: list[tuple[str, tuple[Any, ...]]] = []
    monkeypatch.setattr(app, "send_task", lambda name, args, queue: messages.append((name, tuple(args))))
    return messages


def key_of(place: Workplace) -> DocumentKey:
    with place.database.reading() as session:
        waiting = select(ItemRow.document_id).where(ItemRow.state == ItemState.QUEUED)
        return DocumentKey("default", session.scalars(waiting).first() or "")


def answer_here(place: Workplace, key: DocumentKey, choice: Choice) -> bool:
    turns = Turns(place, lambda _unit: None)
    unit = turns.take_this(Stage.WHOLE, *key)
    if unit is None:
        return True
    is_done = one_piece.answer_here(place, turns, unit, choice)
    turns.put_back(unit)  # where it still holds it
    return is_done


def waits(place: Workplace, stage: Stage, key: DocumentKey, snapshot_id: int | None = None) -> None:
    with place.database.writing() as session:
        documents = [key.document_id]
        add_units(session, stage, key.tenant, documents, tier=Tier.BATCH, now=utc_now(), snapshot_id=snapshot_id)


def report(place: Workplace, job: Submission) -> list[ReportRow]:
    with place.database.reading() as session:
        return list(job_report(session, "default", job.job_id))


def split(place: Workplace, key: DocumentKey) -> None:
    snapshot_id = prepare_snapshot(place, *key)
    assert snapshot_id is not None
    with place.database.reading() as session:
        row = session.get(SnapshotRow, snapshot_id)
    assert row is not None
    assert not answer_waiting(place, row)


def test_answers_are_those_of_the_split_with_their_quotes_and_say_their_way(
    open_place: Callable[..., Workplace], submit_texts: Submit
) -> None:
    place = open_place()
    once = submit_texts(place, TEXT, questions=6, quote=True)
    key = key_of(place)

    assert answer_here(place, key, FALLBACK)
    again = submit_texts(place, TEXT, questions=6, quote=True)
    split(place, key)

    one_piece, from_snapshot = report(place, once), report(place, again)
    assert {row.state for row in one_piece} == {ItemState.ANSWERED}
    assert {(row.way, row.why) for row in one_piece} == {("fallback", "no_prefill_pool")}
    assert {(row.way, row.why) for row in from_snapshot} == {("split", "mode")}
    said = [[(row.answer, row.quote, row.quote_start) for row in rows] for rows in (one_piece, from_snapshot)]
    assert said[0] == said[1]


def test_nothing_is_stored_and_the_next_may_make_the_snapshot(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)

    answer_here(place, key_of(place), FALLBACK)

    assert not [*place.store.keys("chunks/"), *place.store.keys("manifests/")]
    with place.database.reading() as session:
        row = session.scalars(select(SnapshotRow)).one()
    assert (row.state, row.owner, row.attempts, row.size_bytes) == (SnapshotState.WRITING, None, 0, 0)


def test_the_one_reading_is_shared_by_the_items_and_charged_once(place: Workplace, submit_texts: Submit) -> None:
    job = submit_texts(place, TEXT, questions=5)
    answer_here(place, key_of(place), FALLBACK)

    with place.database.reading() as session:
        shares = session.scalars(select(AnswerRow.prefill_s)).all()
        made = session.scalars(select(ReadingRow)).one()
        used = usage(session, by=ChargeBy.JOB, tenant="default", now=utc_now())[job.job_id]
    assert len(shares) == 5
    assert shares == [pytest.approx(made.prefill_s / 5)] * 5
    assert (made.way, made.computed_tokens) == ("one_piece", used.computed_tokens)
    assert used.prefill_s == pytest.approx(made.prefill_s)
    assert (used.stored_bytes, used.stored_gb_months, used.loaded_bytes) == (0, 0, 0)


def test_who_waited_for_the_reading_has_it_in_the_time_to_the_first_token(
    place: Workplace, submit_texts: Submit
) -> None:
    submit_texts(place, TEXT, questions=6)  # two more than fit at once
    answer_here(place, key_of(place), FALLBACK)

    with place.database.reading() as session:
        read_s = session.scalars(select(ReadingRow.prefill_s)).one()
        answers = session.scalars(select(AnswerRow).order_by(AnswerRow.item_id)).all()
    assert all(read_s < answer.first_token_s < answer.total_s for answer in answers[:4])


def test_the_next_questions_find_it_in_memory_until_the_document_is_forgotten(
    open_place: Callable[..., Workplace], submit_texts: Submit
) -> None:
    place = open_place(memory_cache_mb=64)
    submit_texts(place, TEXT)
    key = key_of(place)
    answer_here(place, key, FALLBACK)
    again = submit_texts(place, TEXT)
    Upkeep(app, place)._drop_residents()

    answer_here(place, key, FALLBACK)

    with place.database.reading() as session:
        readings = session.scalars(select(ReadingRow).order_by(ReadingRow.created_at)).all()
    assert [reading.way for reading in readings] == ["one_piece", "found"]
    assert {row.state for row in report(place, again)} == {ItemState.ANSWERED}
    assert place.residents.keys() == [unstored_key(readings[0].snapshot_id)]
    assert place.texts.keys() == [key]
    forget_document(place.database, place.store, *key, now=utc_now())
    Upkeep(app, place)._drop_residents()
    assert not place.residents.keys()
    assert not place.texts.keys()


def test_a_document_that_another_worker_reads_is_left_to_it(
    open_place: Callable[..., Workplace], submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = open_place(), open_place()
    submit_texts(place, TEXT)
    key = key_of(place)
    read = one_piece.prefill
    begun: list[int] = []

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        begun.append(1)
        assert answer_here(other, key, FALLBACK)
        assert prepare_snapshot(other, *key) is None
        return read(*args, **kwargs)

    monkeypatch.setattr(one_piece, "prefill", meanwhile)

    answer_here(place, key, FALLBACK)

    assert begun == [1]
    with place.database.reading() as session:
        assert len(session.scalars(select(AnswerRow)).all()) == 3


def test_a_document_that_cannot_be_read_fails_as_in_the_split(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit_texts(place, TEXT)

    def overflow(*_: Any, **__: Any) -> None:
        raise NonFiniteLogits

    monkeypatch.setattr(one_piece, "prefill", overflow)
    assert answer_here(place, key_of(place), FALLBACK)

    assert {(row.state, row.error_code) for row in report(place, job)} == {(ItemState.FAILED, "prefill_failed")}


def test_what_does_not_fit_here_is_left_to_the_prefill_pool(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit_texts(place, TEXT)

    def refuse(*_: Any) -> None:
        raise MemoryExceeded("Reading this", 2, 1, "cpu", "Wait")

    monkeypatch.setattr(one_piece, "require_room_to_read", refuse)

    assert not answer_here(place, key_of(place), FALLBACK)
    assert {row.state for row in report(place, job)} == {ItemState.QUEUED}
    assert answer_here(place, key_of(place), Choice(Way.ONE_PIECE, Why.MODE))  # asked for: it is said what is wrong
    assert {row.error_code for row in report(place, job)} == {"prefill_failed"}


def test_a_worker_that_died_while_reading_too_often_sets_the_document_aside(
    open_place: Callable[..., Workplace], submit_texts: Submit
) -> None:
    place = open_place(max_attempts=1)
    job = submit_texts(place, TEXT)
    key = key_of(place)
    prepare_snapshot(place, *key)
    with place.database.writing() as session:
        session.execute(update(SnapshotRow).values(state=SnapshotState.WRITING, owner=None, attempts=1))

    assert answer_here(place, key, FALLBACK)

    assert {row.error_code for row in report(place, job)} == {"prefill_failed"}


def test_earlier_answers_are_carried_over_before_anything_is_read(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    key = key_of(place)
    answer_here(place, key, FALLBACK)

    again = submit_texts(place, TEXT, reuse_answers=True, questions=4)
    answer_here(place, key, FALLBACK)

    rows = report(place, again)
    assert [row.carried_from is None for row in rows] == [False, False, False, True]
    assert {row.state for row in rows} == {ItemState.ANSWERED}


def test_the_mode_of_a_job_sends_it_to_who_answers_and_no_prefill_is_made(
    open_place: Callable[..., Workplace], submit_texts: Submit, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place()
    monkeypatch.setattr(app, "workplace", place)
    job = submit_texts(place, TEXT, mode=Mode.MONOLITHIC)
    kick_waiting(app, place.database, place.settings)
    key = key_of(place)
    assert sent == [("platemaker.answer", key)]

    answer_document(*key)

    assert len(sent) == 1
    assert {(row.way, row.why) for row in report(place, job)} == {("one_piece", "mode")}
    answer_document(*key)  # delivered twice
    with place.database.reading() as session:
        assert len(session.scalars(select(AnswerRow)).all()) == 3


def test_a_message_that_is_out_of_date_goes_back_to_the_prefill_pool(
    place: Workplace, submit_texts: Submit, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "workplace", place)
    submit_texts(place, TEXT)
    key = key_of(place)
    waits(place, Stage.WHOLE, key)
    place.duty = Duty(Pool.DECODE)

    answer_document(*key)

    assert sent == [("platemaker.prefill", key)]


def test_one_question_on_a_short_document_goes_in_one_piece_once_it_is_measured(
    place: Workplace, submit_texts: Submit, sent: list[Any]
) -> None:
    first = submit_texts(place, TEXT, questions=3)
    kick_waiting(app, place.database, place.settings)
    split(place, key_of(place))

    submit_texts(place, OTHER_TEXT, questions=1)
    kick_waiting(app, place.database, place.settings)

    assert [name for name, _ in sent] == ["platemaker.prefill", "platemaker.answer"]
    assert {(row.way, row.why) for row in report(place, first)} == {("split", "unmeasured")}


def test_a_ready_snapshot_is_used_when_the_split_cannot_be_had(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    key = key_of(place)
    split(place, key)
    again = submit_texts(place, TEXT)

    answer_here(place, key, FALLBACK)

    assert {row.way for row in report(place, again)} == {"split"}
    with place.database.reading() as session:
        ways = dict(session.execute(select(ReadingRow.way, ReadingRow.prefill_s)).all())
    assert ways["found"] == 0


class Away:
    """Makes a workplace's store fail, as one that does not answer."""

    def __init__(self, place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place = place
        self._patch = monkeypatch

    def begin(self) -> None:
        def fail(*_: Any) -> Any:
            assert self._place.store_breaker is not None
            self._place.store_breaker.failed()
            raise StoreUnavailable

        for name in ("get", "read_into", "put", "size"):
            self._patch.setattr(self._place.store, name, fail)


@pytest.fixture
def hasty(open_place: Callable[..., Workplace], monkeypatch: pytest.MonkeyPatch) -> Workplace:
    place = open_place(memory_cache_mb=64, breaker_failures=1, upkeep_s=0.01)
    place.duty = Duty(Pool.DECODE)
    monkeypatch.setattr(app, "workplace", place)
    return place


@pytest.mark.parametrize("quote", [False, True])
def test_decode_goes_on_from_memory_while_the_store_is_away(
    hasty: Workplace, submit_texts: Submit, sent: list[Any], monkeypatch: pytest.MonkeyPatch, quote: bool
) -> None:
    first = submit_texts(hasty, TEXT, quote=quote)
    key = key_of(hasty)
    split(hasty, key)
    again = submit_texts(hasty, TEXT, quote=quote)
    Away(hasty, monkeypatch).begin()
    with hasty.database.reading() as session:
        snapshot_id = session.scalars(select(SnapshotRow.snapshot_id)).one()
    waits(hasty, Stage.ANSWER, key, snapshot_id)

    decode_snapshot(snapshot_id)

    assert not sent
    said = [[(row.answer, row.quote) for row in report(hasty, job)] for job in (first, again)]
    assert said[0] == said[1]


def test_without_its_snapshot_in_memory_the_document_is_read_again_where_its_text_is(
    hasty: Workplace, submit_texts: Submit, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = submit_texts(hasty, TEXT)
    key = key_of(hasty)
    split(hasty, key)
    hasty.residents.drop(hasty.residents.keys())
    again = submit_texts(hasty, TEXT)
    Away(hasty, monkeypatch).begin()
    with hasty.database.reading() as session:
        snapshot_id = session.scalars(select(SnapshotRow.snapshot_id)).one()
    waits(hasty, Stage.ANSWER, key, snapshot_id)

    with pytest.raises(StoreUnavailable):
        decode_snapshot(snapshot_id)
    assert sent == [("platemaker.answer", key)]
    answer_document(*key)

    assert {(row.way, row.why) for row in report(hasty, again)} == {("fallback", "store_breaker")}
    assert [row.answer for row in report(hasty, again)] == [row.answer for row in report(hasty, first)]


def test_without_its_text_the_document_waits_and_nothing_fails(
    hasty: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit_texts(hasty, TEXT, mode=Mode.MONOLITHIC)
    key = key_of(hasty)
    Away(hasty, monkeypatch).begin()

    with pytest.raises(StoreUnavailable):
        answer_here(hasty, key, Choice(Way.ONE_PIECE, Why.MODE))

    with hasty.database.reading() as session:
        assert {(item.state, item.attempts) for item in session.scalars(select(ItemRow))} == {(ItemState.QUEUED, 0)}
    assert {row.error for row in report(hasty, job)} == {None}


def test_prefill_that_keeps_failing_opens_its_breaker_and_a_success_closes_it(
    open_place: Callable[..., Workplace], submit_texts: Submit, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(breaker_failures=2, upkeep_s=0.01)
    monkeypatch.setattr(app, "workplace", place)
    submit_texts(place, TEXT)
    key = key_of(place)

    def state() -> str:
        with place.database.reading() as session:
            return breaker_state(session, PREFILL, place.settings.breaker_rule, utc_now()).value

    with monkeypatch.context() as broken:
        Away(place, broken).begin()
        for expected in ("closed", "open"):
            with pytest.raises(StoreUnavailable):
                prefill_document(*key)
            assert state() == expected
    assert place.store_breaker is not None
    place.store_breaker.succeeded()

    prefill_document(*key)

    assert state() == "closed"


def test_a_document_that_cannot_be_read_is_no_failure_of_the_pool(
    open_place: Callable[..., Workplace], submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(breaker_failures=1)
    monkeypatch.setattr(app, "workplace", place)
    submit_texts(place, TEXT)
    monkeypatch.setattr(type(place.engine.model), "forward", _overflow)

    prefill_document(*key_of(place))

    with place.database.reading() as session:
        assert not session.scalars(select(BreakerRow)).all()
        assert session.scalars(select(JobRow.num_failed)).one() == 3


def _overflow(*_: Any, **__: Any) -> None:
    raise NonFiniteLogits
