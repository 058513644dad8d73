from sqlalchemy import update

from storage.database import Database
from storage.items import claim_items
from storage.overview import overview
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import find_or_create
from storage.tiers import Stage, Tier
from storage.units import take_this_unit
from tests.storage.made_rows import DOC, NOW, OTHER_DOC, fingerprint, later, source, submit


def test_an_empty_database_has_nothing_to_tell(database: Database) -> None:
    with database.reading() as session:
        found = overview(session, now=NOW, workers_seen_after=NOW)

    assert set(found.items.values()) == {0}
    assert (found.open_jobs, found.oldest_reading_s, found.oldest_answering_s) == (0, 0.0, 0.0)
    assert found.workers == {} and set(found.leases.values()) == {0}


def test_what_waits_to_be_read_is_told_from_what_waits_to_be_answered(database: Database) -> None:
    submit(database, sources=[source(DOC)], questions=2, now=later(-50))
    submit(database, sources=[source(OTHER_DOC)], questions=3, now=later(-20))
    with database.writing() as session:
        row = find_or_create(session, fingerprint(document_id=DOC), num_tokens=10, now=NOW)
        session.execute(
            update(SnapshotRow)
            .where(SnapshotRow.snapshot_id == row.snapshot_id)
            .values(state=SnapshotState.READY, size_bytes=700)
        )

    with database.reading() as session:
        found = overview(session, now=NOW, workers_seen_after=NOW)

    assert found.items["queued"] == 5
    assert (found.oldest_answering_s, found.oldest_reading_s) == (50.0, 20.0)
    assert found.snapshots == {"ready": 1} and found.snapshot_bytes == {"ready": 700}
    assert found.open_jobs == 2


def test_what_a_worker_holds_is_a_lease(database: Database) -> None:
    submit(database, questions=3)
    with database.writing() as session:
        claim_items(session, tenant="acme", document_id=DOC, model="tiny", owner="w", limit=2, now=NOW, lease_s=30)

    with database.reading() as session:
        found = overview(session, now=NOW, workers_seen_after=NOW)

    assert (found.items["running"], found.items["queued"], found.leases["items"]) == (2, 1, 2)


def test_documents_that_wait_for_a_worker_are_counted_by_stage_and_tier(database: Database) -> None:
    submit(database, sources=[source(DOC), source(OTHER_DOC)], now=later(-50))
    submit(database, tenant="other", tier=Tier.FAST, now=later(-20))
    with database.writing() as session:
        taken = take_this_unit(session, Stage.READ, "acme", DOC, owner="w", now=NOW, lease_s=30)

    with database.reading() as session:
        found = overview(session, now=NOW, workers_seen_after=NOW)

    assert taken is not None
    assert found.units[Stage.READ, Tier.BATCH] == (1, 50.0)
    assert found.units[Stage.READ, Tier.FAST] == (1, 20.0)
    assert found.units[Stage.ANSWER, Tier.BATCH] == (0, 0.0)
