"""What is done next, on both databases: the most urgent, then whoever was given least, within limits that hold."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from sqlalchemy import select, update

from storage.choice import AHEAD, candidates, take_one
from storage.database import Database
from storage.forget import forget_document
from storage.limits import Limits, TenantLimit
from storage.objects import FolderStore
from storage.schema import ShareRow, SnapshotRow, SnapshotState, UnitRow
from storage.snapshots import find_or_create, note_readings
from storage.tiers import Stage, Tier
from storage.units import (
    HALF_LIFE_S,
    Unit,
    WaitingUnit,
    add_units,
    charge,
    drop_unit,
    end_unit,
    find_waiting,
    oldest_waiting,
    put_back_unit,
    recover_units,
    renew_units,
)
from tests.storage.made_rows import DOC, NOW, claim, fingerprint, later, race, source, submit

BOTH = (Stage.READ, Stage.ANSWER)
NONE = Limits()


def doc(number: int) -> str:
    return f"{number:064x}"


def take(
    database: Database,
    seconds: float = 0,
    *,
    owner: str = "worker-1",
    stages: tuple[Stage, ...] = BOTH,
    tiers: Collection[Tier] = tuple(Tier),
    limits: Limits = NONE,
    in_memory: Collection[int] = (),
    lease_s: float = 60,
) -> Unit | None:
    now = later(seconds)
    with database.reading() as session:
        found = candidates(session, stages=stages, tiers=tiers, limits=limits, now=now)
    for candidate in found:
        with database.writing() as session:
            unit = take_one(
                session, candidate, limits=limits, in_memory=in_memory, owner=owner, now=now, lease_s=lease_s
            )
        if unit is not None:
            return unit
    return None


def end(database: Database, unit: Unit, seconds: float, used_s: float = 0.0) -> WaitingUnit | None:
    with database.writing() as session:
        charge(session, unit.tenant, used_s, now=later(seconds))
        return end_unit(session, unit, model="tiny", now=later(seconds))


def documents(database: Database, tenant: str, count: int, *, first: int = 0, seconds: float = 0, **job: Any) -> str:
    sources = [source(doc(number), f"{number}.pdf") for number in range(first, first + count)]
    return submit(database, sources=sources, questions=1, tenant=tenant, now=later(seconds), **job)


def test_fast_work_comes_before_batch_work_whoever_was_given_how_much(database: Database) -> None:
    documents(database, "acme", 2)
    documents(database, "busy", 1, seconds=5, tier=Tier.FAST)
    with database.writing() as session:
        charge(session, "busy", 10_000, now=NOW)

    taken = [take(database, 9), take(database, 9)]

    assert [(unit.tenant, unit.tier) for unit in taken if unit] == [("busy", "fast"), ("acme", "batch")]
    assert take(database, 9, tiers=[Tier.FAST]) is None


def test_a_few_documents_of_one_tenant_do_not_wait_for_the_many_of_another(database: Database) -> None:
    documents(database, "many", 200)
    served = []
    for second in range(30):
        if second == 10:
            documents(database, "few", 3, first=500, seconds=second)
        unit = take(database, second)
        assert unit is not None
        served.append(unit.tenant)
        end(database, unit, second + 1, used_s=1.0)

    assert served[10:13] == ["few"] * 3
    assert set(served[:10] + served[13:]) == {"many"}


def test_tenants_are_served_by_their_weights_and_what_was_long_ago_is_forgotten(database: Database) -> None:
    limits = Limits({"gold": TenantLimit(weight=3)})
    for tenant in ("gold", "iron"):
        documents(database, tenant, 60)
    served = []
    for second in range(40):
        unit = take(database, second, limits=limits)
        assert unit is not None
        served.append(unit.tenant)
        end(database, unit, second + 1, used_s=1.0)

    assert 28 <= served.count("gold") <= 32
    with database.writing() as session:
        before = session.get_one(ShareRow, "gold").served_s
        charge(session, "gold", 1.0, now=later(40 + HALF_LIFE_S))
        after = session.get_one(ShareRow, "gold").served_s
    assert 0.9 * before / 2 < after - 1.0 < 1.1 * before / 2


def test_what_is_under_way_counts_so_that_workers_who_begin_together_serve_all(database: Database) -> None:
    for tenant in ("a", "b", "c"):
        documents(database, tenant, 10)

    begun = [take(database, owner=f"worker-{number}") for number in range(6)]

    assert sorted(unit.tenant for unit in begun if unit) == ["a", "a", "b", "b", "c", "c"]


def ready(database: Database, count: int) -> list[int]:
    """Snapshots of the first documents, with their questions; one second younger each."""
    ids = []
    for number in range(count):
        submit(database, sources=[source(doc(number))], questions=2, now=later(number))
        with database.writing() as session:
            row = find_or_create(session, fingerprint(document_id=doc(number)), num_tokens=8, now=NOW)
            row.state = SnapshotState.READY
            session.flush()
            note_readings(session, row, model="tiny", computed_tokens=8, prefill_s=1.0, now=NOW)
            add_units(
                session,
                Stage.ANSWER,
                "acme",
                [doc(number)],
                tier=Tier.BATCH,
                now=later(number),
                snapshot_id=row.snapshot_id,
            )
            ids.append(row.snapshot_id)
    return ids


def test_a_snapshot_in_memory_goes_ahead_of_older_ones_and_not_of_much_older_ones(database: Database) -> None:
    ids = ready(database, 4)
    answering = (Stage.ANSWER,)

    first = take(database, 9, stages=answering, in_memory=[ids[2]])
    second = take(database, 9, stages=answering, in_memory=[ids[2]])
    assert first is not None and second is not None
    assert (first.snapshot_id, second.snapshot_id) == (ids[2], ids[0])

    with database.writing() as session:
        session.execute(update(UnitRow).where(UnitRow.snapshot_id == ids[1]).values(since=NOW - AHEAD))
    third = take(database, 9, stages=answering, in_memory=[ids[3]])
    assert third is not None and third.snapshot_id == ids[1]


def test_the_limit_of_a_tenant_holds_among_workers_that_begin_together(database: Database) -> None:
    documents(database, "acme", 20)
    documents(database, "free", 2)
    limits = Limits({"acme": TenantLimit(running=3)})

    def work(number: int) -> list[Unit]:
        taken = (take(database, owner=f"worker-{number}-{turn}", limits=limits) for turn in range(2))
        return [unit for unit in taken if unit is not None]

    begun = [unit for units in race(work, 8) for unit in units]

    assert sorted(unit.tenant for unit in begun) == ["acme"] * 3 + ["free"] * 2
    assert take(database, limits=limits) is None
    own = next(unit for unit in begun if unit.tenant == "acme")
    end(database, own, 1)
    with database.reading() as session:
        assert [unit.stage for unit in oldest_waiting(session, "acme", now=later(1))] == [Stage.READ]
    again = take(database, 1, limits=limits)
    assert again is not None and again.tenant == "acme"
    assert take(database, 1, limits=limits) is None


def test_a_unit_is_taken_once_however_many_want_it(database: Database) -> None:
    documents(database, "acme", 5)

    begun = race(lambda number: take(database, owner=f"worker-{number}"), 8)

    assert sorted(unit.document_id for unit in begun if unit) == [doc(number) for number in range(5)]


def test_what_a_dead_worker_held_is_free_when_its_lease_runs_out(database: Database) -> None:
    documents(database, "acme", 2)
    dead, alive = take(database, owner="dead"), take(database, owner="alive")
    assert dead is not None and alive is not None
    with database.writing() as session:
        renew_units(session, "alive", now=later(50), lease_s=60)

    assert take(database, 60) is None
    with database.writing() as session:
        lost = recover_units(session, now=later(61))
    assert [unit.document_id for unit in lost] == [dead.document_id]

    taken = take(database, 61)
    assert taken is not None and taken.document_id == dead.document_id
    assert end(database, dead, 62) is None  # it comes back to life, and changes nothing
    with database.writing() as session:
        assert put_back_unit(session, dead) is None
        assert not drop_unit(session, dead)
        assert find_waiting(session, Stage.READ, "acme", dead.document_id, now=later(62)) is None


def test_an_answered_unit_is_gone_and_one_with_questions_left_waits_again(database: Database) -> None:
    (snapshot_id,) = ready(database, 1)
    unit = take(database, stages=(Stage.ANSWER,))
    assert unit is not None
    first = claim(database, document_id=doc(0), limit=1)
    left = end(database, unit, 1)
    assert left == WaitingUnit(Stage.ANSWER, Tier.BATCH, "acme", doc(0), snapshot_id)

    again = take(database, 1, stages=(Stage.ANSWER,))
    assert again is not None and len(first) == len(claim(database, document_id=doc(0))) == 1
    assert end(database, again, 2) is None
    with database.reading() as session:
        assert session.scalars(select(UnitRow).where(UnitRow.stage == Stage.ANSWER)).all() == []


def test_what_is_asked_for_while_it_is_done_is_done_again(database: Database) -> None:
    documents(database, "acme", 1)
    unit = take(database)
    assert unit is not None
    documents(database, "acme", 1, seconds=1, tier=Tier.FAST)

    assert end(database, unit, 2) == WaitingUnit(Stage.READ, Tier.FAST, "acme", doc(0), None)
    again = take(database, 2)
    assert again is not None and end(database, again, 3) is None


def test_a_unit_is_as_urgent_as_what_still_waits_for_it(database: Database) -> None:
    ready(database, 1)
    fast = submit(database, sources=[source(doc(0))], questions=1, tier=Tier.FAST)
    with database.writing() as session:
        add_units(session, Stage.ANSWER, "acme", [doc(0)], tier=Tier.FAST, now=NOW, snapshot_id=1)
    unit = take(database, stages=(Stage.ANSWER,))
    assert unit is not None and unit.tier == Tier.FAST
    assert {item.job_id for item in claim(database, document_id=doc(0), only_fast=True)} == {fast}

    left = end(database, unit, 1)

    assert left is not None and left.tier == Tier.BATCH


def test_a_snapshot_out_of_use_leaves_no_unit_to_answer(database: Database) -> None:
    ready(database, 1)
    unit = take(database, stages=(Stage.ANSWER,))
    assert unit is not None
    with database.writing() as session:
        session.execute(update(SnapshotRow).values(state=SnapshotState.QUARANTINED))

    assert end(database, unit, 1) is None


def test_forgetting_a_document_forgets_its_units(database: Database, tmp_path: Path) -> None:
    submit(database, sources=[source()])
    store = FolderStore(tmp_path)

    forget_document(database, store, "acme", DOC, now=NOW)

    assert take(database) is None
