"""What workers do for the lifetimes of snapshots: lease while they answer, expire and sweep in their upkeep."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

import tasks.loading
import tasks.upkeep
from pipeline.submit import Submission
from storage.database import utc_now
from storage.forget import forget_document
from storage.leases import live_leases, take_lease
from storage.objects import LocalCopies
from storage.schema import DocumentRow, SnapshotLeaseRow, SnapshotRow, SnapshotState
from storage.snapshots import get_snapshot
from tasks.app import app
from tasks.decode import answer_waiting
from tasks.loading import LoadedPrefix, loaded
from tasks.prefill import prepare_snapshot
from tasks.upkeep import Upkeep
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

TENANT = "default"


@pytest.fixture
def row(place: Workplace, submit_texts: Callable[..., Submission]) -> SnapshotRow:
    """A ready snapshot with one question that waits for it."""
    submit_texts(place, TEXT[:200], questions=1)
    with place.database.reading() as session:
        document_id = session.scalars(select(DocumentRow.document_id)).one()
    snapshot_id = prepare_snapshot(place, TENANT, document_id)
    assert snapshot_id is not None
    return look(place, snapshot_id)


def look(place: Workplace, snapshot_id: int) -> SnapshotRow:
    with place.database.reading() as session:
        return get_snapshot(session, snapshot_id)


@pytest.fixture
def upkeep(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upkeep]:
    monkeypatch.setattr(tasks.upkeep, "kick_waiting", lambda *_: 0)
    yield Upkeep(app, place)


def test_a_snapshot_is_leased_while_it_is_read_and_not_longer(
    place: Workplace, row: SnapshotRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def load(place: Workplace, row: SnapshotRow) -> AbstractContextManager[LoadedPrefix]:
        with place.database.reading() as session:
            seen.extend(live_leases(session, row.snapshot_id, now=utc_now()))
        return loaded(place, row)

    monkeypatch.setattr(tasks.loading, "loaded", load)
    before = utc_now()

    assert not answer_waiting(place, row)

    assert len(seen) == 1
    with place.database.reading() as session:
        assert session.scalars(select(SnapshotLeaseRow)).all() == []
    expires_at = look(place, row.snapshot_id).expires_at
    assert expires_at is not None
    assert expires_at >= before + timedelta(seconds=place.lifetimes.ttl_s)


def test_a_snapshot_that_has_expired_meanwhile_is_not_read(place: Workplace, row: SnapshotRow) -> None:
    with place.database.writing() as session:
        session.execute(update(SnapshotRow).values(state=SnapshotState.EXPIRED))

    assert answer_waiting(place, row)

    with place.database.reading() as session:
        assert session.scalars(select(SnapshotLeaseRow)).all() == []


def test_the_heartbeat_renews_leases(place: Workplace, row: SnapshotRow) -> None:
    with place.database.writing() as session:
        take_lease(session, row.snapshot_id, owner="w1", now=utc_now(), lease_s=0.01, ttl_s=60)

    place.heartbeat._beat(["w1"])

    with place.database.reading() as session:
        (lease,) = live_leases(session, row.snapshot_id, now=utc_now())
    assert lease.expires_at > utc_now() + timedelta(seconds=20)


def test_upkeep_expires_each_round_and_sweeps_seldom(
    place: Workplace, row: SnapshotRow, upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not answer_waiting(place, row)
    upkeep.once()
    assert look(place, row.snapshot_id).state == SnapshotState.READY
    with place.database.writing() as session:
        session.execute(update(SnapshotRow).values(expires_at=utc_now() - timedelta(seconds=1)))

    upkeep.once()
    assert look(place, row.snapshot_id).state == SnapshotState.EXPIRED
    assert look(place, row.snapshot_id).manifest_sha256 is not None

    monkeypatch.setattr(tasks.upkeep, "SWEEP_PAUSE_S", 0.0)
    upkeep.once()
    assert look(place, row.snapshot_id).manifest_sha256 is None


def test_upkeep_deletes_copies_of_what_was_forgotten_elsewhere(
    place: Workplace, row: SnapshotRow, upkeep: Upkeep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = place.store
    place.store = LocalCopies(elsewhere, tmp_path / "copies", 10**9)
    for key in elsewhere.keys("chunks/"):
        place.store.get(key)
    copies = tmp_path / "copies" / "chunks"
    upkeep.once()
    assert [*copies.iterdir()]

    forget_document(place.database, elsewhere, TENANT, row.document_id, now=utc_now())
    monkeypatch.setattr(tasks.upkeep, "PRUNE_PAUSE_S", 0.0)
    upkeep.once()

    assert [*copies.iterdir()] == []
