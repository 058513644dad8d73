"""Messages are permissions: what is done when one comes, and which are sent behind it."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

import tasks.hints
import tasks.turns
from pipeline.submit import Submission
from storage.database import utc_now
from storage.endings import cancel_job
from storage.kicks import take_unkicked
from storage.limits import Limits, TenantLimit
from storage.manifest import chunk_object_key
from storage.progress import job_status
from storage.schema import AnswerRow, ChunkRow, ItemRow, ItemState, SnapshotRow, UnitRow
from storage.tiers import Stage, Tier
from storage.units import WaitingUnit, charge
from tasks.answering import Answering
from tasks.app import app
from tasks.queues import Duty, Pool, Tiers, queue_of
from tasks.turns import Turns
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]


class Wire:
    """The queues of a cluster with one worker: messages in the order that a broker gives them."""

    def __init__(self, place: Workplace) -> None:
        self.place = place
        self.sent: list[WaitingUnit] = []

    def kick(self) -> None:
        with self.place.database.writing() as session:
            an_hour_ago = utc_now() - timedelta(hours=1)
            self.sent += take_unkicked(session, now=utc_now(), kicked_before=an_hour_ago, limit=100)

    def deliver(self, unit: WaitingUnit | None = None) -> None:
        """This message, or the next of those that the worker takes."""
        if unit is None:
            order = {queue: at for at, queue in enumerate(self.place.duty.queues)}
            unit = min(
                (each for each in self.sent if queue_of(each.stage, each.tier) in order),
                key=lambda each: order[queue_of(each.stage, each.tier)],
            )
        self.sent.remove(unit)
        if unit.stage == Stage.READ:
            tasks.hints.prefill_document(unit.tenant, unit.document_id)
        else:
            tasks.hints.decode_snapshot(unit.snapshot_id)

    def deliver_all(self) -> int:
        count = 0
        while self.sent:
            self.deliver()
            count += 1
            assert count < 500, "messages beget messages for ever"
        return count


@pytest.fixture
def wire_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Workplace], Wire]:
    def wired(place: Workplace) -> Wire:
        wire = Wire(place)
        monkeypatch.setattr(app, "workplace", place)
        monkeypatch.setattr(tasks.hints, "send_hint", lambda _app, unit: wire.sent.append(unit))
        return wire

    return wired


@pytest.fixture
def wire(place: Workplace, wire_of: Callable[[Workplace], Wire]) -> Iterator[Wire]:
    yield wire_of(place)


def texts(count: int, *, first: int = 0) -> list[str]:
    return [TEXT[: 400 - 7 * number] for number in range(first, first + count)]


def items(place: Workplace, made: Submission, tenant: str = "default") -> dict[ItemState, int]:
    with place.database.reading() as session:
        return job_status(session, tenant, made.job_id).items


def num_units(place: Workplace) -> int:
    with place.database.reading() as session:
        return session.scalar(select(func.count()).select_from(UnitRow)) or 0


def give(place: Workplace, tenant: str, seconds: float) -> None:
    with place.database.writing() as session:
        charge(session, tenant, seconds, now=utc_now())


def test_a_message_of_one_tenant_does_the_work_of_another_that_was_given_less(wire: Wire, submit_texts: Submit) -> None:
    many = submit_texts(wire.place, *texts(4), tenant="many")
    few = submit_texts(wire.place, *texts(1, first=9), tenant="few")
    wire.kick()
    give(wire.place, "many", 100.0)

    wire.deliver(wire.sent[0])
    wire.deliver(wire.sent[0])

    assert items(wire.place, few, "few") == {ItemState.ANSWERED: 3}
    assert items(wire.place, many, "many") == {ItemState.QUEUED: 12}
    wire.deliver_all()
    assert items(wire.place, many, "many") == {ItemState.ANSWERED: 12}
    assert num_units(wire.place) == 0


def test_there_are_about_as_many_messages_as_units(wire: Wire, submit_texts: Submit) -> None:
    for tenant in ("a", "b", "c"):
        submit_texts(wire.place, *texts(5), tenant=tenant)
    wire.kick()

    delivered = wire.deliver_all()

    assert num_units(wire.place) == 0
    assert delivered <= 3 * 15 + 2


def in_turn(wire: Wire) -> list[tuple[Stage, int]]:
    """Delivers messages of both stages in turn, as a broker in this process does; what each did, and how many answers
    were there then."""
    did = []
    while wire.sent:
        before = num_read(wire.place)
        wanted = Stage.READ if len(did) % 2 == 0 else Stage.ANSWER
        wire.deliver(next((unit for unit in wire.sent if unit.stage == wanted), wire.sent[0]))
        did.append((Stage.READ if num_read(wire.place) > before else Stage.ANSWER, num_answers(wire.place)))
        assert len(did) < 100
    return did


def num_read(place: Workplace) -> int:
    with place.database.reading() as session:
        return session.scalars(
            select(func.count()).select_from(SnapshotRow).where(SnapshotRow.ready_at.is_not(None))
        ).one()


def num_answers(place: Workplace) -> int:
    with place.database.reading() as session:
        return session.scalars(select(func.count()).select_from(AnswerRow)).one()


def test_a_worker_that_reads_and_answers_reads_on_until_the_questions_fill_a_batch(
    wire: Wire, submit_texts: Submit
) -> None:
    size = wire.place.engine.settings.max_batch
    submit_texts(wire.place, *texts(4), questions=size // 2 - 1)
    wire.kick()

    did = in_turn(wire)

    assert [stage for stage, _ in did[:3]] == [Stage.READ] * 3
    assert [answers for _, answers in did[:3]] == [0] * 3
    assert did[-1][1] == 4 * (size // 2 - 1)


def test_fast_questions_are_answered_before_more_is_read(wire: Wire, submit_texts: Submit) -> None:
    submit_texts(wire.place, *texts(3), questions=1, tier=Tier.FAST)
    wire.kick()

    did = in_turn(wire)

    assert [stage for stage, _ in did[:2]] == [Stage.READ, Stage.ANSWER] and did[1][1] == 1


def fast_after(
    monkeypatch: pytest.MonkeyPatch, wire: Wire, submit_texts: Submit, claims: int, **job: Any
) -> list[Submission]:
    """Submits a fast job when the worker has claimed questions so many times."""
    made: list[Submission] = []
    seen: list[int] = []
    claim = Answering._claim

    def claiming(self: Answering, opened: Any) -> Any:
        claimed = claim(self, opened)
        seen.append(len(claimed))
        if len(seen) == claims:
            made.append(submit_texts(wire.place, *texts(1, first=20), questions=1, tier=Tier.FAST, **job))
            wire.kick()
        return claimed

    monkeypatch.setattr(Answering, "_claim", claiming)
    return made


def test_a_long_batch_lets_fast_work_in_and_goes_on_behind_it(
    wire: Wire, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = submit_texts(wire.place, TEXT, questions=30)
    wire.kick()
    wire.deliver()
    fast = fast_after(monkeypatch, wire, submit_texts, claims=2)

    wire.deliver()

    assert items(wire.place, batch) == {ItemState.ANSWERED: 8, ItemState.QUEUED: 22}
    assert {(unit.stage, unit.tier) for unit in wire.sent} == {("answer", "batch"), ("read", "fast")}
    wire.deliver()
    wire.deliver()
    assert items(wire.place, fast[0]) == {ItemState.ANSWERED: 1}
    assert items(wire.place, batch)[ItemState.ANSWERED] == 8
    wire.deliver_all()
    assert items(wire.place, batch) == {ItemState.ANSWERED: 30}
    with wire.place.database.reading() as session:
        assert set(session.scalars(select(ItemRow.attempts))) == {1}


def test_a_message_of_a_batch_job_does_fast_work_and_is_sent_again(wire: Wire, submit_texts: Submit) -> None:
    batch = submit_texts(wire.place, TEXT)
    wire.kick()
    fast = submit_texts(wire.place, *texts(1), tier=Tier.FAST)

    wire.deliver()

    assert {(unit.stage, unit.tier) for unit in wire.sent} == {("read", "batch"), ("answer", "fast")}
    wire.deliver_all()
    assert items(wire.place, fast) == items(wire.place, batch) == {ItemState.ANSWERED: 3}


def test_a_worker_of_one_tier_leaves_the_other_alone(
    wire: Wire, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.place.duty = Duty(Pool.ALL, Tiers.BATCH)
    batch = submit_texts(wire.place, TEXT, questions=12)
    wire.kick()
    wire.deliver()
    fast = fast_after(monkeypatch, wire, submit_texts, claims=1)

    wire.deliver()

    assert items(wire.place, batch) == {ItemState.ANSWERED: 12}
    assert items(wire.place, fast[0]) == {ItemState.QUEUED: 1}
    wire.place.duty = Duty(Pool.ALL, Tiers.FAST)
    wire.deliver_all()
    assert items(wire.place, fast[0]) == {ItemState.ANSWERED: 1}


def test_fast_questions_are_answered_few_at_a_time(
    open_place: Callable[..., Workplace],
    wire_of: Callable[[Workplace], Wire],
    submit_texts: Submit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = wire_of(open_place(fast_batch=2))
    sizes: list[int] = []
    claim = Answering._claim

    def claiming(self: Answering, opened: Any) -> Any:
        claimed = claim(self, opened)
        sizes.append(len(claimed))
        return claimed

    monkeypatch.setattr(Answering, "_claim", claiming)
    for tier in Tier:
        submit_texts(wire.place, *texts(1), questions=4, tier=tier)
        wire.kick()
        wire.deliver_all()

    assert [size for size in sizes if size] == [2, 2, 4]


def test_one_document_with_very_many_questions_does_not_keep_others_waiting(
    wire: Wire, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.turns, "CLAIMS", 2)
    many = submit_texts(wire.place, TEXT, questions=30, tenant="many")
    few = submit_texts(wire.place, *texts(1), questions=1, tenant="few")
    give(wire.place, "few", 50.0)
    wire.kick()
    wire.deliver()
    claim = Answering._claim

    def claiming(self: Answering, opened: Any) -> Any:
        give(wire.place, "many", 100.0)
        return claim(self, opened)

    monkeypatch.setattr(Answering, "_claim", claiming)
    wire.deliver()

    assert items(wire.place, many, "many") == {ItemState.ANSWERED: 8, ItemState.QUEUED: 22}
    wire.deliver()
    wire.deliver()
    assert items(wire.place, few, "few") == {ItemState.ANSWERED: 1}
    wire.deliver_all()
    assert items(wire.place, many, "many") == {ItemState.ANSWERED: 30}


def test_what_is_over_a_limit_waits_and_is_taken_up_when_there_is_room(wire: Wire, submit_texts: Submit) -> None:
    wire.place.limits = Limits({"default": TenantLimit(running=1)})
    made = submit_texts(wire.place, *texts(3))
    wire.kick()
    turns = Turns(wire.place, wire.sent.append)
    elsewhere = turns.take(prefers=Stage.READ)  # another worker's
    assert elsewhere is not None

    wire.deliver_all()

    assert items(wire.place, made) == {ItemState.QUEUED: 9}
    turns.put_back(elsewhere)
    wire.deliver_all()
    assert items(wire.place, made) == {ItemState.ANSWERED: 9}
    assert num_units(wire.place) == 0


def test_a_limit_holds_for_documents_that_one_task_answers_side_by_side(
    open_place: Callable[..., Workplace],
    wire_of: Callable[[Workplace], Wire],
    submit_texts: Submit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = wire_of(open_place(memory_cache_mb=64))
    wire.place.limits = Limits({"default": TenantLimit(running=2)})
    made = submit_texts(wire.place, *texts(5), questions=1)
    most = 0
    claim = Answering._claim

    def claiming(self: Answering, opened: Any) -> Any:
        nonlocal most
        most = max(most, len(self._open))
        return claim(self, opened)

    monkeypatch.setattr(Answering, "_claim", claiming)
    wire.kick()
    wire.deliver_all()

    assert items(wire.place, made) == {ItemState.ANSWERED: 5}
    assert most == 2


def test_what_is_damaged_is_read_again_in_its_own_tier(wire: Wire, submit_texts: Submit) -> None:
    made = submit_texts(wire.place, TEXT, tier=Tier.FAST)
    wire.kick()
    wire.deliver()
    with wire.place.database.reading() as session:
        key = session.scalars(select(ChunkRow.chunk_key)).first()
    wire.place.store.delete(chunk_object_key(str(key)))

    wire.deliver()

    assert [(unit.stage, unit.tier) for unit in wire.sent] == [("read", "fast")]
    wire.deliver_all()
    assert items(wire.place, made) == {ItemState.ANSWERED: 3}


def test_a_worker_told_to_stop_puts_its_unit_back_at_once(
    wire: Wire, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = submit_texts(wire.place, TEXT)
    wire.kick()

    def stopped(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(tasks.hints, "prepare_snapshot", stopped)
        wire.deliver()

    assert [(unit.stage, unit.tier) for unit in wire.sent] == [("read", "batch")]
    wire.deliver_all()
    assert items(wire.place, made) == {ItemState.ANSWERED: 3}


def test_units_of_a_cancelled_job_are_passed_in_one_go(wire: Wire, submit_texts: Submit) -> None:
    cancelled = submit_texts(wire.place, *texts(3))
    wire.kick()
    with wire.place.database.writing() as session:
        cancel_job(session, "default", cancelled.job_id, utc_now())
    kept = submit_texts(wire.place, *texts(1, first=9))

    wire.deliver()

    assert [unit.stage for unit in wire.sent].count(Stage.ANSWER) == 1
    wire.deliver_all()
    assert items(wire.place, kept) == {ItemState.ANSWERED: 3}


def test_where_a_snapshot_came_from_is_noted_once_for_each_time_it_is_answered_from(
    open_place: Callable[..., Workplace], wire_of: Callable[[Workplace], Wire], submit_texts: Submit
) -> None:
    wire = wire_of(open_place(memory_cache_mb=64))
    for _ in range(2):
        submit_texts(wire.place, TEXT)
        wire.kick()
        wire.deliver_all()

    with wire.place.database.reading() as session:
        found = session.scalars(select(AnswerRow.loaded_from).order_by(AnswerRow.item_id)).all()
        assert len(session.scalars(select(SnapshotRow)).all()) == 1
    assert sorted(found, key=str) == [None] * 4 + ["memory", "store"]
