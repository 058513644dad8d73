"""What is known to have ended holds nothing any more, and how it ended is kept."""

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from storage.database import Database
from storage.deaths import note_death
from storage.items import recover_items
from storage.leases import take_lease
from storage.objects import FolderStore
from storage.schema import ItemRow, ItemState, LineageRow, SnapshotLeaseRow
from storage.snapshots import claim_writing, find_or_create
from tests.storage.made_rows import NOW, claim, fingerprint, later, submit
from tests.storage.stored_snapshots import store_snapshot


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


def die(database: Database, worker: str, at: float) -> int:
    with database.writing() as session:
        return note_death(session, worker, "SIGSEGV", now=later(at))


def put_back(database: Database, at: float) -> list[ItemRow]:
    with database.writing() as session:
        recover_items(session, now=later(at), max_attempts=3)
    with database.reading() as session:
        return list(session.scalars(select(ItemRow).order_by(ItemRow.item_id)))


def test_what_a_dead_worker_held_is_put_back_before_its_lease_ends_and_what_others_hold_is_not(
    database: Database,
) -> None:
    submit(database, questions=4)
    claim(database, "host:1:a", limit=2)
    claim(database, "host:12:b")  # its name begins like the other's

    die(database, "host:1", 1)

    items = put_back(database, 2)
    assert [item.state for item in items] == [ItemState.QUEUED] * 2 + [ItemState.RUNNING] * 2
    assert [(item.attempts, item.error) for item in items[:2]] == [(1, None)] * 2


def test_a_document_that_is_set_aside_says_how_its_worker_ended(database: Database) -> None:
    submit(database, questions=1)
    for attempt in range(3):
        claim(database, f"host:{attempt}:a", now=later(attempt))
        die(database, f"host:{attempt}", attempt + 0.5)
        (item,) = put_back(database, attempt + 0.6)

    assert (item.state, item.error_code) == (ItemState.FAILED, "worker_died")
    assert item.error == "The worker died 3 times on this document, the last time by SIGSEGV; it is set aside."


def test_a_snapshot_is_free_for_the_next_writer_and_its_reader_is_forgotten(
    database: Database, store: FolderStore
) -> None:
    read = store_snapshot(database, store, 1)
    with database.writing() as session:
        take_lease(session, read, owner="host:1:a", now=NOW, lease_s=60, ttl_s=600)
        written = find_or_create(session, fingerprint(document_id="d9" * 32), num_tokens=4, now=NOW).snapshot_id
        assert claim_writing(session, written, owner="host:1:b", now=NOW, lease_s=60)

    assert die(database, "host:1", 1) == 2

    with database.writing() as session:
        assert not session.scalars(select(SnapshotLeaseRow)).all()
        assert claim_writing(session, written, owner="host:2:a", now=later(1) + timedelta(milliseconds=1), lease_s=60)
        events = session.execute(
            select(LineageRow.snapshot_id, LineageRow.detail).where(LineageRow.event == "worker died")
        )
        assert sorted(map(tuple, events)) == [(read, "host:1 by SIGSEGV"), (written, "host:1 by SIGSEGV")]
