"""Breakers open, let one through, and close: in one process, and in rows that all processes see."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.breaker import Breaker, BreakerRule, BreakerState
from storage.database import Database
from storage.errors import ObjectMissing, StoreDenied, StoreUnavailable
from storage.objects import FolderStore, GuardedStore, ObjectStore
from storage.shared_breaker import PREFILL, breaker_state, note_failure, note_success, take_probe
from tests.storage.made_rows import later, race

RULE = BreakerRule(failures=3, window_s=100, cool_down_s=10)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(RULE, clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failed()


def test_failures_in_the_window_open_it(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.state == BreakerState.CLOSED
    breaker.failed()

    assert breaker.state == BreakerState.OPEN
    assert not breaker.lets_through()


def test_failures_far_apart_or_with_a_success_between_do_not(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 2)
    clock.now += 101
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)

    assert breaker.state == BreakerState.CLOSED


def test_one_is_let_through_after_the_cool_down_and_decides(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 10
    assert breaker.state == BreakerState.HALF_OPEN
    assert [breaker.lets_through() for _ in range(3)] == [True, False, False]

    breaker.failed()
    assert breaker.state == BreakerState.OPEN
    clock.now += 10
    assert breaker.lets_through()
    breaker.succeeded()

    assert breaker.state == BreakerState.CLOSED
    assert breaker.lets_through()


class FailingStore(FolderStore):
    """Raises what it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.error: Exception | None = None
        self.asked = 0

    def get(self, key: str) -> bytes:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return super().get(key)


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[FailingStore]:
    store = FailingStore(tmp_path)
    store.put("a/b", b"x")
    yield store
    store.close()


def test_a_store_that_keeps_failing_is_not_asked_and_its_error_is_told(
    failing: FailingStore, breaker: Breaker, clock: Clock
) -> None:
    store: ObjectStore = GuardedStore(failing, breaker)
    failing.error = StoreDenied()
    for _ in range(5):
        with pytest.raises(StoreDenied):
            store.get("a/b")
    assert failing.asked == 3

    failing.error = None
    clock.now += 10

    assert store.get("a/b") == b"x"
    assert breaker.state == BreakerState.CLOSED


def test_an_object_that_is_not_there_is_no_failure(failing: FailingStore, breaker: Breaker) -> None:
    store = GuardedStore(failing, breaker)
    failing.error = StoreUnavailable()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.get("a/b")
    failing.error = None
    for _ in range(3):
        with pytest.raises(ObjectMissing):
            store.get("a/missing")

    assert breaker.state == BreakerState.CLOSED
    assert list(store.keys("a/")) == ["a/b"]


def state(database: Database, seconds: float) -> BreakerState:
    with database.reading() as session:
        return breaker_state(session, PREFILL, RULE, later(seconds))


def failed(database: Database, seconds: float) -> bool:
    with database.writing() as session:
        return note_failure(session, PREFILL, RULE, later(seconds))


def test_what_one_process_notes_all_see(database: Database) -> None:
    assert state(database, 0) == BreakerState.CLOSED
    assert [failed(database, seconds) for seconds in (0, 1, 2, 3)] == [False, False, True, False]
    assert state(database, 4) == BreakerState.OPEN
    assert state(database, 12) == BreakerState.HALF_OPEN

    with database.writing() as session:
        assert note_success(session, PREFILL)
        assert not note_success(session, PREFILL)

    assert state(database, 12) == BreakerState.CLOSED


def test_failures_outside_the_window_begin_anew(database: Database) -> None:
    assert not any(failed(database, seconds) for seconds in (0, 1, 102, 103))
    assert failed(database, 104)


def probe(database: Database, seconds: float) -> bool:
    with database.writing() as session:
        return take_probe(session, PREFILL, RULE, now=later(seconds), probe_s=5)


def test_of_all_that_want_to_probe_one_does(database: Database) -> None:
    for seconds in (0, 1, 2):
        failed(database, seconds)
    assert not probe(database, 5)

    assert sorted(race(lambda _: probe(database, 13), 4)) == [False, False, False, True]

    assert not probe(database, 17)
    assert probe(database, 19)  # nothing was heard of the first
    failed(database, 20)
    assert state(database, 21) == BreakerState.OPEN
    assert not probe(database, 25)
