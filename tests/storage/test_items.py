"""Items on both databases: claimed once, ended once, put back when their worker is gone."""

from collections import Counter
from collections.abc import Callable

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.database import Database
from storage.endings import cancel_job
from storage.items import (
    answer_item,
    cancel_item,
    cancelled_items,
    claim_items,
    fail_document_items,
    fail_item,
    queued_items,
    recover_items,
    release_items,
    renew_items,
)
from storage.job_report import job_report
from storage.kicks import take_unkicked
from storage.progress import job_status
from storage.schema import AnswerRow, ItemRow, ItemState
from storage.tiers import Stage, Tier
from storage.units import WaitingUnit
from tests.storage.made_rows import DOC, NOW, OTHER_DOC, answer, claim, later, question, race, source, submit

OPEN = (ItemState.QUEUED, ItemState.RUNNING)


def items(database: Database, *, state: ItemState | None = None) -> list[ItemRow]:
    with database.reading() as session:
        query = select(ItemRow).order_by(ItemRow.item_id)
        return list(session.scalars(query if state is None else query.where(ItemRow.state == state)))


def states(database: Database) -> Counter[str]:
    return Counter(item.state for item in items(database))


def answers(database: Database) -> dict[int, str]:
    with database.reading() as session:
        return {row.item_id: row.text for row in session.scalars(select(AnswerRow))}


def recover(database: Database, seconds: float, max_attempts: int = 3) -> int:
    with database.writing() as session:
        return recover_items(session, now=later(seconds), max_attempts=max_attempts)


def finish(database: Database, item_id: int, owner: str = "worker-1", text: str = "Yes.") -> bool:
    with database.writing() as session:
        return answer_item(session, item_id, owner=owner, answer=answer(text), now=later(1))


def test_items_of_fast_jobs_are_claimed_first_and_alone_where_that_is_wanted(database: Database) -> None:
    submit(database, questions=2)
    fast = submit(database, questions=3, tier=Tier.FAST)

    first = claim(database, limit=2, only_fast=True)
    then = claim(database, "worker-2", limit=2)

    assert [item.job_id == fast for item in (*first, *then)] == [True, True, True, False]
    assert claim(database, "worker-3", only_fast=True) == []


def test_workers_that_claim_at_the_same_time_never_get_the_same_item(database: Database) -> None:
    for _ in range(4):
        submit(database, questions=25)

    def work(number: int) -> list[int]:
        mine: list[int] = []
        while claimed := claim(database, f"worker-{number}", limit=3):
            mine += [item.item_id for item in claimed]
            for item in claimed:
                assert finish(database, item.item_id, f"worker-{number}", f"by {number}")
        return mine

    claimed_by = race(work, 8)

    every = sorted(item_id for mine in claimed_by for item_id in mine)
    assert every == [item.item_id for item in items(database)]
    assert answers(database) == {item_id: f"by {n}" for n, mine in enumerate(claimed_by) for item_id in mine}
    assert {item.attempts for item in items(database)} == {1}


def test_every_item_ends_once_while_workers_die_stop_and_cancel(database: Database) -> None:
    """Owners that vanish, stop in order or are overtaken, with the sweep and a cancel in between."""
    kept, cancelled = submit(database, questions=30), submit(database, questions=30)

    def work(number: int) -> int:
        written = 0
        for step in range(200):
            owner = f"worker-{number}-{step}"
            claimed = claim(database, owner, limit=3, lease_s=-1 if step % 3 == 1 else 600)
            for item in claimed:
                if step % 4 != 3:
                    written += finish(database, item.item_id, owner)
            with database.writing() as session:
                for item_id in cancelled_items(session, owner, NOW):
                    cancel_item(session, item_id, owner=owner, now=NOW)
                release_items(session, owner)
                if number == 0 and step == 2:
                    cancel_job(session, "acme", cancelled, NOW)
            recover(database, 0, max_attempts=10_000)
            if not any(item.state in OPEN for item in items(database)):
                break
        return written

    written = race(work, 4)

    found = items(database)
    assert sum(written) == len(answers(database)) == sum(item.state == ItemState.ANSWERED for item in found)
    assert {item.state for item in found if item.job_id == kept} == {ItemState.ANSWERED}
    assert {item.state for item in found} <= {ItemState.ANSWERED, ItemState.CANCELLED}
    assert all(item.owner is None and item.lease_until is None and item.finished_at for item in found)
    with database.reading() as session:
        assert job_status(session, "acme", kept).finished_at
        assert job_status(session, "acme", cancelled).finished_at


def test_the_oldest_items_are_claimed_first(database: Database) -> None:
    first, second = submit(database, questions=2), submit(database, questions=2)

    batches = [claim(database, f"worker-{n}", limit=3) for n in range(2)]

    assert [item.job_id for item in batches[0] + batches[1]] == [first, first, second, second]
    assert [item.question for item in batches[0]] == ["Question 0?", "Question 1?", "Question 0?"]
    assert claim(database) == []


def test_a_claim_takes_items_of_its_model_tenant_and_document_only(database: Database) -> None:
    both = [source(), source(OTHER_DOC, "b.pdf")]
    wanted = submit(database, sources=both, questions=2)
    submit(database, questions=2, model="other")
    submit(database, questions=2, tenant="other")

    claimed = claim(database)

    assert [item.job_id for item in claimed] == [wanted] * 2
    with database.reading() as session:
        rows = [session.get_one(ItemRow, item.item_id) for item in claimed]
    assert {(row.document_id, row.tenant, row.owner, row.attempts) for row in rows} == {(DOC, "acme", "worker-1", 1)}
    assert {row.lease_until for row in rows} == {later(60)}
    assert states(database) == {"running": 2, "queued": 6}


def test_what_is_queued_is_seen_without_being_taken(database: Database) -> None:
    submit(database, questions=[question(0, params={"max_new_tokens": 3, "stop": ["\n"]})])

    with database.reading() as session:
        seen = queued_items(session, tenant="acme", document_id=DOC, model="tiny")
        assert queued_items(session, tenant="acme", document_id=DOC, model="other") == []

    assert seen == claim(database)
    assert seen[0].params == {"max_new_tokens": 3, "stop": ["\n"]}


def test_items_of_a_cancelled_job_are_not_claimed(database: Database) -> None:
    cancelled, kept = submit(database), submit(database)
    with database.writing() as session:
        cancel_job(session, "acme", cancelled, NOW)

    assert {item.job_id for item in claim(database)} == {kept}


@pytest.mark.parametrize("owner", ["worker-2", ""])
def test_who_does_not_hold_an_item_changes_nothing(database: Database, owner: str) -> None:
    submit(database, questions=2)
    claim(database, limit=1)
    before = [dict(vars(item)) for item in items(database)]
    endings: list[Callable[[Session, int], bool]] = [
        lambda session, item_id: answer_item(session, item_id, owner=owner, answer=answer(), now=later(1)),
        lambda session, item_id: fail_item(session, item_id, owner=owner, code="x", error="X", now=later(1)),
        lambda session, item_id: cancel_item(session, item_id, owner=owner, now=later(1)),
    ]
    for number in (0, 1):
        for ending in endings:
            with database.writing() as session:
                assert not ending(session, items(database)[number].item_id)
    with database.writing() as session:
        release_items(session, owner)
        renew_items(session, owner, now=later(1), lease_s=60)
        assert cancelled_items(session, owner, NOW) == set()

    for item, expected in zip(items(database), before, strict=True):
        expected.pop("_sa_instance_state")
        assert {name: getattr(item, name) for name in expected} == expected
    assert answers(database) == {}


def test_answering_twice_writes_one_answer(database: Database) -> None:
    submit(database, questions=1)
    (item,) = claim(database)

    assert finish(database, item.item_id, text="First.")
    assert not finish(database, item.item_id, text="Second.")

    assert answers(database) == {item.item_id: "First."}


def test_logprobs_are_kept_as_they_are_and_are_null_where_there_are_none(database: Database) -> None:
    job_id = submit(database, questions=2)
    logprobs = [{"id": 7, "text": "ü\0🖋", "logprob": -0.25, "top": [{"id": 8, "text": "", "logprob": -1e-06}]}]
    first, second = claim(database, "worker-1")
    with database.writing() as session:
        answer_item(session, first.item_id, owner="worker-1", answer=answer(logprobs=logprobs), now=later(1))
        answer_item(session, second.item_id, owner="worker-1", answer=answer(), now=later(1))

    with database.reading() as session:
        assert [row.logprobs for row in job_report(session, "acme", job_id)] == [logprobs, None]
        assert session.scalars(select(AnswerRow.item_id).where(AnswerRow.logprobs.is_(None))).all() == [second.item_id]


def test_of_racing_answers_one_is_written(database: Database) -> None:
    submit(database, questions=1)
    (item,) = claim(database)

    won = race(lambda number: finish(database, item.item_id, text=str(number)), 8)

    assert sum(won) == 1
    assert answers(database) == {item.item_id: str(won.index(True))}


def test_an_overtaken_worker_cannot_answer(database: Database) -> None:
    submit(database, questions=1)
    (item,) = claim(database, "slow", lease_s=60)
    recover(database, 61)
    (again,) = claim(database, "fast", now=later(62))
    assert (again.item_id, item.attempts, again.attempts) == (item.item_id, 0, 1)

    assert not finish(database, item.item_id, "slow", "Late.")
    assert finish(database, item.item_id, "fast", "In time.")

    assert answers(database) == {item.item_id: "In time."}


def test_an_answer_that_cannot_be_written_leaves_its_item_as_it_was(database: Database) -> None:
    submit(database, questions=1)
    (item,) = claim(database)

    with pytest.raises(RuntimeError), database.writing() as session:
        assert answer_item(session, item.item_id, owner="worker-1", answer=answer(), now=later(1))
        raise RuntimeError

    assert states(database) == {"running": 1}
    assert answers(database) == {}
    assert finish(database, item.item_id)


def test_what_is_released_waits_again_and_counts_no_attempt(database: Database) -> None:
    job_id = submit(database, questions=3)
    claimed = claim(database, limit=2)
    claim(database, "worker-2", limit=1)
    finish(database, claimed[0].item_id)
    with database.writing() as session:
        take_unkicked(session, now=NOW, kicked_before=NOW, limit=10)

    with database.writing() as session:
        release_items(session, "worker-1")

    answered, released, others = items(database)
    assert (answered.state, others.state, others.owner) == ("answered", "running", "worker-2")
    assert (released.state, released.owner, released.lease_until, released.kicked_at) == ("queued", None, None, None)
    assert released.attempts == 0
    with database.reading() as session:
        assert job_status(session, "acme", job_id).finished_at is None
    assert [item.item_id for item in claim(database, "worker-3")] == [released.item_id]


def test_what_is_released_after_its_job_was_cancelled_is_ended_by_the_next_sweep(database: Database) -> None:
    job_id = submit(database, questions=2)
    claim(database)
    with database.writing() as session:
        cancel_job(session, "acme", job_id, later(1))
    with database.writing() as session:
        release_items(session, "worker-1")
    assert claim(database) == []

    assert recover(database, 2) == 2

    assert states(database) == {"cancelled": 2}
    with database.reading() as session:
        assert job_status(session, "acme", job_id).finished_at == later(2)
        assert take_unkicked(session, now=NOW, kicked_before=NOW, limit=10) == []


def test_a_lease_that_ran_out_puts_the_item_back(database: Database) -> None:
    submit(database, questions=2)
    claim(database, "dead", limit=1, lease_s=60)
    claim(database, "alive", limit=1, lease_s=600)

    assert recover(database, 60) == 0
    assert recover(database, 61) == 1

    lost, held = items(database)
    assert (lost.state, lost.owner, lost.lease_until, lost.kicked_at) == ("queued", None, None, None)
    assert lost.attempts == 1
    assert (held.state, held.owner) == ("running", "alive")
    assert recover(database, 62) == 0


def test_what_kills_its_workers_is_set_aside(database: Database) -> None:
    job_id = submit(database, questions=1)
    for attempt in (1, 2, 3):
        claim(database, f"worker-{attempt}", now=later(100 * attempt), lease_s=60)
        recover(database, 100 * attempt + 61, max_attempts=3)

    (item,) = items(database)
    assert (item.state, item.error_code, item.attempts) == ("failed", "worker_died", 3)
    assert item.error == "The worker died 3 times on this document; it is set aside."
    assert (item.finished_at, item.owner, item.lease_until) == (later(361), None, None)
    with database.reading() as session:
        assert job_status(session, "acme", job_id).finished_at == later(361)
    assert claim(database) == []


def test_a_renewed_lease_keeps_its_items(database: Database) -> None:
    submit(database, questions=2)
    claim(database, "renewing", limit=1, lease_s=60)
    claim(database, "silent", limit=1, lease_s=60)

    with database.writing() as session:
        renew_items(session, "renewing", now=later(50), lease_s=60)

    assert recover(database, 100) == 1
    assert [item.owner for item in items(database)] == ["renewing", None]
    assert recover(database, 111) == 1


def test_an_owner_is_told_which_of_its_items_were_cancelled(database: Database) -> None:
    cancelled, _ = submit(database, questions=1), submit(database, questions=1)
    first, _ = claim(database)
    with database.writing() as session:
        cancel_job(session, "acme", cancelled, NOW)

    with database.reading() as session:
        assert cancelled_items(session, "worker-1", NOW) == {first.item_id}
        assert cancelled_items(session, "worker-2", NOW) == set()
    finish(database, first.item_id)
    with database.reading() as session:
        assert cancelled_items(session, "worker-1", NOW) == set()


def test_a_failure_keeps_its_reason(database: Database) -> None:
    submit(database, questions=2)
    (held,) = claim(database, limit=1)
    _, queued = items(database)

    with database.writing() as session:
        assert not fail_item(session, held.item_id, owner=None, code="too_long", error="Too long.", now=later(1))
        assert fail_item(session, held.item_id, owner="worker-1", code="decode_failed", error="Odd.", now=later(1))
        assert fail_item(session, queued.item_id, owner=None, code="too_long", error="Too long.", now=later(2))

    assert [(item.state, item.error_code, item.error, item.finished_at) for item in items(database)] == [
        ("failed", "decode_failed", "Odd.", later(1)),
        ("failed", "too_long", "Too long.", later(2)),
    ]


def test_a_document_that_cannot_be_read_ends_what_waits_for_it(database: Database) -> None:
    job_id = submit(database, sources=[source(), source(OTHER_DOC, "b.pdf")], questions=2)
    only = submit(database, questions=1)
    submit(database, questions=1, model="other")
    claim(database, limit=1)

    with database.writing() as session:
        fail_document_items(
            session, tenant="acme", document_id=DOC, model="tiny", code="prefill_failed", error="No.", now=later(1)
        )

    found = [(item.document_id, item.state) for item in items(database)]
    assert found == [
        (DOC, "running"),
        (DOC, "failed"),
        (OTHER_DOC, "queued"),
        (OTHER_DOC, "queued"),
        (DOC, "failed"),
        (DOC, "queued"),
    ]
    with database.reading() as session:
        assert job_status(session, "acme", only).finished_at == later(1)
        assert job_status(session, "acme", job_id).finished_at is None


def take(database: Database, seconds: float = 0, *, patience_s: float = 100, limit: int = 100) -> list[WaitingUnit]:
    with database.writing() as session:
        found = take_unkicked(session, now=later(seconds), kicked_before=later(seconds - patience_s), limit=limit)
    return list(found)


def to_read(tenant: str, document_id: str, tier: Tier = Tier.BATCH) -> WaitingUnit:
    return WaitingUnit(Stage.READ, tier, tenant, document_id, None)


def test_each_document_is_kicked_once_until_patience_ends(database: Database) -> None:
    submit(database, sources=[source(), source(OTHER_DOC, "b.pdf")], questions=3)
    submit(database)
    submit(database, tenant="other")

    first = take(database, 0)

    assert first == [
        to_read("acme", DOC),
        to_read("acme", OTHER_DOC),
        to_read("other", DOC),
    ]
    assert take(database, 0) == []
    assert take(database, 100) == []
    assert take(database, 101) == first
    assert {item.kicked_at for item in items(database)} == {later(101)}


def test_kicks_are_limited_and_none_is_forgotten(database: Database) -> None:
    submit(database, sources=[source(f"{n:064x}", f"{n}.pdf") for n in range(5)], questions=2)

    batches = [take(database, limit=2) for _ in range(4)]

    assert [len(batch) for batch in batches] == [2, 2, 1, 0]
    assert [waiting.document_id for batch in batches for waiting in batch] == [f"{n:064x}" for n in range(5)]


def test_only_documents_that_wait_are_kicked(database: Database) -> None:
    submit(database, questions=2)
    submit(database, sources=[source(OTHER_DOC)], questions=[question(0, error_code="x", error="X")])
    for item in claim(database):
        finish(database, item.item_id)

    assert take(database) == []


def test_fast_documents_and_those_of_the_job_just_submitted_are_kicked_before_all_others(database: Database) -> None:
    for number in range(3):
        submit(database, sources=[source(f"{number:064x}")], questions=1)
    submit(database, sources=[source("f" * 64)], questions=1, tier=Tier.FAST)
    own = submit(database, sources=[source("e" * 64)], questions=1)

    with database.writing() as session:
        found = take_unkicked(session, now=NOW, kicked_before=NOW, limit=3, first=own)

    expected = [to_read("acme", "e" * 64), to_read("acme", "f" * 64, Tier.FAST), to_read("acme", f"{0:064x}")]
    assert found == expected


def test_a_new_job_or_a_lost_worker_kicks_a_document_again_at_once(database: Database) -> None:
    submit(database, questions=1)
    assert take(database, 0) == [to_read("acme", DOC)]

    submit(database, questions=1)
    assert take(database, 1) == [to_read("acme", DOC)]
    assert {item.kicked_at for item in items(database)} == {later(1)}

    claim(database, limit=1, lease_s=10)
    recover(database, 11)
    assert take(database, 12) == [to_read("acme", DOC)]


def test_workers_that_sweep_at_the_same_time_kick_each_document_once(database: Database) -> None:
    submit(database, sources=[source(f"{n:064x}", f"{n}.pdf") for n in range(20)], questions=2)

    batches = race(lambda _: take(database), 6)

    assert sorted(waiting.document_id for batch in batches for waiting in batch) == [f"{n:064x}" for n in range(20)]


def test_a_claim_whose_worker_fails_before_the_commit_takes_nothing(database: Database) -> None:
    submit(database)

    with pytest.raises(RuntimeError), database.writing() as session:
        assert claim_items(
            session, tenant="acme", document_id=DOC, model="tiny", owner="w", limit=9, now=NOW, lease_s=60
        )
        raise RuntimeError

    assert states(database) == {"queued": 3}
