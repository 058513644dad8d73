"""Lifetimes on both databases: what is needed stays, what is not goes, whole and in order."""

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import select, update

from storage.database import Database
from storage.documents import get_text, put_text
from storage.endings import cancel_job
from storage.errors import DocumentUnknown, ObjectMissing, SnapshotInUse, SnapshotMissing
from storage.forget import Forgotten, forget_document, forget_tenant
from storage.items import answer_item
from storage.job_report import job_report
from storage.leases import live_leases, release_leases, renew_leases, take_lease
from storage.lineage import snapshot_lineage
from storage.objects import FolderStore
from storage.progress import job_status
from storage.retention import Lifetimes, expire, pin, remove, unpin
from storage.schema import (
    AnswerRow,
    ChunkRow,
    ItemRow,
    LineageRow,
    ReadingRow,
    SnapshotRow,
    SnapshotState,
    SourceRow,
    TombstoneRow,
)
from storage.settings import StorageSettings
from storage.snapshots import claim_writing, find_or_create, get_snapshot, note_readings, publish, quarantine
from storage.sweep import Swept, sweep
from tests.storage.made_rows import DOC, NOW, OTHER_DOC, answer, claim, fingerprint, later, manifest, source, submit
from tests.storage.stored_snapshots import look, make_old, objects, state_of, store_chunk, store_snapshot

DAY = 86400.0
LIFETIMES = Lifetimes(ttl_s=7 * DAY, max_age_s=90 * DAY, grace_s=3600)
READY, EXPIRED, REMOVED = SnapshotState.READY, SnapshotState.EXPIRED, SnapshotState.REMOVED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def store(folder: Path) -> Iterator[FolderStore]:
    yield FolderStore(folder)


def use(database: Database, snapshot_id: int, seconds: float, *, owner: str = "w1", lease_s: float = 0) -> None:
    with database.writing() as session:
        assert take_lease(session, snapshot_id, owner=owner, now=later(seconds), lease_s=lease_s, ttl_s=7 * DAY)


def expire_at(database: Database, seconds: float, lifetimes: Lifetimes = LIFETIMES) -> int:
    with database.writing() as session:
        return expire(session, lifetimes, now=later(seconds))


def remove_at(database: Database, snapshot_id: int, seconds: float = 0, *, tenant: str = "acme") -> None:
    with database.writing() as session:
        remove(session, tenant, snapshot_id, now=later(seconds))


def events(database: Database, snapshot_id: int) -> list[tuple[str, str]]:
    with database.reading() as session:
        return [(row.event, row.detail) for row in snapshot_lineage(session, get_snapshot(session, snapshot_id))]


def test_a_snapshot_lives_its_ttl_after_each_use(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)

    for days in (0, 5, 10):
        use(database, snapshot_id, days * DAY)
        assert expire_at(database, (days + 6.9) * DAY) == 0
    assert expire_at(database, 17.1 * DAY) == 1

    assert state_of(database, snapshot_id) == EXPIRED
    assert events(database, snapshot_id)[-1] == ("expired", "not used for its time to live")


def test_the_time_of_a_snapshot_that_was_never_used_begins_when_it_is_seen(
    database: Database, store: FolderStore
) -> None:
    snapshot_id = store_snapshot(database, store, 1)

    assert expire_at(database, DAY) == 0
    assert look(database, snapshot_id).expires_at == later(8 * DAY)
    assert expire_at(database, 8.1 * DAY) == 1


def test_use_does_not_carry_a_snapshot_past_its_maximum_age(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 89.9 * DAY)

    assert expire_at(database, 89.9 * DAY) == 0
    assert LIFETIMES.end_of(look(database, snapshot_id)) == later(90 * DAY)
    assert expire_at(database, 90.1 * DAY) == 1

    assert events(database, snapshot_id)[-1] == ("expired", "reached its maximum age")


def test_a_pin_holds_against_the_ttl_but_not_the_maximum_age(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0)
    with database.writing() as session:
        pin(session, "acme", snapshot_id, now=NOW)
        pin(session, "acme", snapshot_id, now=NOW)

    assert expire_at(database, 60 * DAY) == 0
    assert LIFETIMES.end_of(look(database, snapshot_id)) == later(90 * DAY)
    assert expire_at(database, 91 * DAY) == 1
    assert [event for event, _ in events(database, snapshot_id)] == ["published", "pinned", "expired"]


def test_without_its_pin_a_snapshot_expires_again(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0)
    with database.writing() as session:
        pin(session, "acme", snapshot_id, now=NOW)
        unpin(session, "acme", snapshot_id, now=NOW)

    assert expire_at(database, 8 * DAY) == 1


def test_a_lease_that_is_renewed_keeps_a_snapshot_past_every_limit(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0, lease_s=30)
    with database.writing() as session:
        renew_leases(session, "w1", now=later(100 * DAY), lease_s=30)

    assert expire_at(database, 100 * DAY + 29) == 0
    assert expire_at(database, 100 * DAY + 31) == 1
    with database.reading() as session:
        assert live_leases(session, snapshot_id, now=NOW) == []


def test_a_lease_given_back_holds_nothing(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0, lease_s=100 * DAY)
    use(database, snapshot_id, 0, owner="w2", lease_s=100 * DAY)
    with database.writing() as session:
        release_leases(session, "w1")

    assert expire_at(database, 8 * DAY) == 0
    with database.writing() as session:
        release_leases(session, "w2")
    assert expire_at(database, 8 * DAY) == 1


def test_only_a_ready_snapshot_is_leased(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    remove_at(database, snapshot_id)

    with database.writing() as session:
        assert not take_lease(session, snapshot_id, owner="w1", now=NOW, lease_s=30, ttl_s=DAY)
        assert live_leases(session, snapshot_id, now=NOW) == []


@pytest.mark.parametrize("running", [False, True])
def test_a_snapshot_that_open_items_need_does_not_expire(database: Database, store: FolderStore, running: bool) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0)
    job_id = submit(database, questions=1)
    items = claim(database) if running else []

    assert expire_at(database, 100 * DAY) == 0

    with database.writing() as session:
        cancel_job(session, "acme", job_id, NOW)
        for item in items:
            answer_item(session, item.item_id, owner="worker-1", answer=answer(), now=NOW)
    assert expire_at(database, 100 * DAY) == 1


def test_items_of_another_tenant_or_document_keep_nothing(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0)
    submit(database, tenant="other")
    submit(database, sources=[source(OTHER_DOC)])

    assert expire_at(database, 8 * DAY) == 1
    assert state_of(database, snapshot_id) == EXPIRED


@pytest.mark.parametrize("hours", [-11, 0, 14])
def test_expiry_does_not_depend_on_the_zone_that_times_are_given_in(
    database: Database, store: FolderStore, hours: int
) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0)
    zone = timezone(timedelta(hours=hours))

    def expire_in_zone(at: datetime) -> int:
        with database.writing() as session:
            return expire(session, LIFETIMES, now=at.astimezone(zone))

    assert expire_in_zone(later(7 * DAY - 1)) == 0
    assert expire_in_zone(later(7 * DAY + 1)) == 1


def test_a_quarantined_or_abandoned_snapshot_expires_too(database: Database, store: FolderStore) -> None:
    damaged = store_snapshot(database, store, 1)
    abandoned = store_snapshot(database, store, 2, document_id=OTHER_DOC)
    for snapshot_id in (damaged, abandoned):
        use(database, snapshot_id, 0)
    with database.writing() as session:
        quarantine(session, damaged, "damaged")
        quarantine(session, abandoned, "damaged")
        claim_writing(session, abandoned, owner="w2", now=NOW, lease_s=20 * DAY)

    assert expire_at(database, 8 * DAY) == 1
    assert expire_at(database, 21 * DAY) == 1


def test_what_is_being_written_does_not_expire(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    with database.writing() as session:
        quarantine(session, snapshot_id, "damaged")
        claim_writing(session, snapshot_id, owner="w2", now=later(100 * DAY), lease_s=30)

    assert expire_at(database, 100 * DAY + 1) == 0
    with pytest.raises(SnapshotInUse):
        remove_at(database, snapshot_id, 100 * DAY + 1)


def test_over_the_budget_the_least_recently_used_that_nobody_needs_go(database: Database, store: FolderStore) -> None:
    documents = {
        name: f"{number:064x}" for number, name in enumerate(["oldest", "pinned", "needed", "older", "newest"])
    }
    ids = {}
    for number, (name, document_id) in enumerate(documents.items()):
        ids[name] = store_snapshot(database, store, number, document_id=document_id)
        use(database, ids[name], number)
    submit(database, sources=[source(documents["needed"])])
    with database.writing() as session:
        pin(session, "acme", ids["pinned"], now=NOW)

    budget = Lifetimes(ttl_s=7 * DAY, max_age_s=90 * DAY, grace_s=0, budget_bytes=350)
    assert expire_at(database, 60, budget) == 2
    assert expire_at(database, 60, budget) == 0

    assert {name for name, snapshot_id in ids.items() if state_of(database, snapshot_id) == EXPIRED} == {
        "oldest",
        "older",
    }


def test_a_shared_chunk_counts_once_against_the_budget(database: Database, store: FolderStore) -> None:
    store_snapshot(database, store, 1, 2)
    store_snapshot(database, store, 1, 3, document_id=OTHER_DOC)

    for budget_bytes, expired in ((300, 0), (299, 1)):
        assert expire_at(database, 60, Lifetimes(7 * DAY, 90 * DAY, 0, budget_bytes)) == expired


def test_an_expired_snapshot_is_written_again_when_asked_for(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0)
    expire_at(database, 8 * DAY)

    assert store_snapshot(database, store, 1, now=later(8 * DAY)) == snapshot_id

    assert state_of(database, snapshot_id) == READY
    assert expire_at(database, 8 * DAY) == 0
    assert [event for event, _ in events(database, snapshot_id)] == ["published", "expired", "recomputed"]


def test_a_needed_snapshot_is_not_removed(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    use(database, snapshot_id, 0, lease_s=30)

    with pytest.raises(SnapshotInUse):
        remove_at(database, snapshot_id, 10)
    remove_at(database, snapshot_id, 31)
    remove_at(database, snapshot_id, 31)

    assert state_of(database, snapshot_id) == REMOVED
    assert events(database, snapshot_id)[1:] == [("removed", "")]


def test_a_snapshot_of_another_tenant_cannot_be_pinned_or_removed(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)

    for change in (pin, unpin, remove):
        with pytest.raises(SnapshotMissing), database.writing() as session:
            change(session, "other", snapshot_id, now=NOW)
    assert state_of(database, snapshot_id) == READY


def test_the_sweep_takes_exactly_what_no_snapshot_refers_to(database: Database, store: FolderStore) -> None:
    gone = store_snapshot(database, store, 1, 2)
    store_snapshot(database, store, 1, 3, document_id=OTHER_DOC)
    store_chunk(database, store, 9)
    remove_at(database, gone)

    swept = sweep(database, store, LIFETIMES, now=later(3601))

    assert (swept.manifests, swept.chunks, swept.chunk_bytes) == (1, 2, 200)
    assert objects(store) == {"1", "3", "manifest acme"}
    assert sweep(database, store, LIFETIMES, now=later(7200)) == Swept(0, 0, 0, 0, 0, 0)
    with database.reading() as session:
        assert {int(key, 16) for key in session.scalars(select(ChunkRow.chunk_key))} == {1, 3}


def test_chunks_younger_than_the_grace_time_stay(database: Database, store: FolderStore) -> None:
    store_chunk(database, store, 1)

    assert sweep(database, store, LIFETIMES, now=later(3599)).chunks == 0
    assert sweep(database, store, LIFETIMES, now=later(3601)).chunks == 1


def test_chunks_of_a_prefill_that_takes_longer_than_the_grace_time_stay(database: Database, store: FolderStore) -> None:
    with database.writing() as session:
        row = find_or_create(session, fingerprint(), num_tokens=8, now=NOW)
        claim_writing(session, row.snapshot_id, owner="slow", now=NOW, lease_s=8000)
    store_chunk(database, store, 1, now=later(1))
    store_chunk(database, store, 2, now=later(-1))
    store_chunk(database, store, 3, now=later(1), tenant="other")

    sweep(database, store, LIFETIMES, now=later(7000))
    assert objects(store) == {"1"}

    sweep(database, store, LIFETIMES, now=later(9000))
    assert objects(store) == set()


def test_a_lease_keeps_the_objects_of_a_removed_snapshot(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    remove_at(database, snapshot_id)
    with database.writing() as session:  # taken in the moment before
        session.execute(update(SnapshotRow).values(state=READY))
    use(database, snapshot_id, 0, lease_s=9000)
    with database.writing() as session:
        session.execute(update(SnapshotRow).values(state=REMOVED))

    sweep(database, store, LIFETIMES, now=later(8000))
    assert objects(store) == {"1", "manifest acme"}

    sweep(database, store, LIFETIMES, now=later(9001))
    assert objects(store) == set()


def test_objects_without_a_row_go_when_they_are_old(database: Database, store: FolderStore, folder: Path) -> None:
    store_snapshot(database, store, 1)
    store.put(f"chunks/{9:064x}.safetensors", b"orphan")
    store.put(f"manifests/acme/{DOC}/{'ab' * 32}.json", b"{}")
    store.put(f"documents/acme/{DOC}.txt", b"text")
    make_old(folder, NOW)

    assert sweep(database, store, LIFETIMES, now=later(3599)).orphans == 0
    swept = sweep(database, store, LIFETIMES, now=later(3601))

    assert (swept.orphans, swept.orphan_bytes) == (2, 8)
    assert objects(store) == {"1", "manifest acme", "document acme"}


def test_a_dry_run_says_the_same_and_changes_nothing(database: Database, store: FolderStore, folder: Path) -> None:
    gone = store_snapshot(database, store, 1, 2)
    store_snapshot(database, store, 1, document_id=OTHER_DOC)
    store.put(f"chunks/{9:064x}.safetensors", b"orphan")
    remove_at(database, gone)
    make_old(folder, NOW)

    planned = sweep(database, store, LIFETIMES, now=later(3601), dry_run=True)

    assert objects(store) == {"1", "2", "9", "manifest acme"}
    assert look(database, gone).manifest_sha256 is not None
    assert sweep(database, store, LIFETIMES, now=later(3601)) == planned
    assert objects(store) == {"1", "manifest acme"}


@pytest.mark.parametrize("last_call", [1, 2, 3])
def test_a_sweep_that_is_cut_off_leaves_nothing_ready_and_is_ended_by_the_next(
    database: Database, store: FolderStore, folder: Path, monkeypatch: pytest.MonkeyPatch, last_call: int
) -> None:
    gone = store_snapshot(database, store, 1, 2)
    remove_at(database, gone)
    make_old(folder, NOW)
    calls = 0
    delete = store.delete

    def cut_off(key: str) -> None:
        nonlocal calls
        calls += 1
        if calls == last_call:
            raise KeyboardInterrupt
        delete(key)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "delete", cut_off)
        sweep(database, store, LIFETIMES, now=later(3601))
    assert state_of(database, gone) == REMOVED

    sweep(database, store, LIFETIMES, now=later(3601))
    assert objects(store) == set()


def test_a_snapshot_is_not_published_on_chunks_that_were_swept_meanwhile(
    database: Database, store: FolderStore
) -> None:
    with database.writing() as session:
        row = find_or_create(session, fingerprint(), num_tokens=4, now=NOW)
        claimed = claim_writing(session, row.snapshot_id, owner="w1", now=NOW, lease_s=60)
    assert claimed is not None
    entry = store_chunk(database, store, 1, now=later(-9000))
    sweep(database, store, LIFETIMES, now=NOW)

    with pytest.raises(ObjectMissing), database.writing() as session:
        publish(
            session, claimed, manifest((entry,)), manifest_sha256="5" * 64, computed_tokens=0, prefill_s=0.0, now=NOW
        )

    assert state_of(database, row.snapshot_id) == SnapshotState.WRITING


def answered_job(database: Database, snapshot_id: int, *, document_id: str = DOC, tenant: str = "acme") -> str:
    job_id = submit(database, sources=[source(document_id)], questions=2, tenant=tenant)
    items = claim(database, document_id=document_id, tenant=tenant, limit=1)
    with database.writing() as session:
        note_readings(
            session, get_snapshot(session, snapshot_id), model="tiny", computed_tokens=8, prefill_s=2.0, now=NOW
        )
        answer_item(session, items[0].item_id, owner="worker-1", answer=answer(snapshot_id=snapshot_id), now=NOW)
    return job_id


def test_forgetting_leaves_what_others_use_and_a_tombstone(database: Database, store: FolderStore) -> None:
    forgotten = store_snapshot(database, store, 1, 2)
    kept = store_snapshot(database, store, 1, 3, document_id=OTHER_DOC)
    for document_id in (DOC, OTHER_DOC):
        put_text(store, "acme", document_id, "The fee is 7.")
    job_id = answered_job(database, forgotten)
    other_job = answered_job(database, kept, document_id=OTHER_DOC)

    counts = forget_document(database, store, "acme", DOC, now=later(1))

    assert counts == Forgotten(documents=1, sources=1, items=2, answers=1, snapshots=1, chunks=1)
    assert objects(store) == {"1", "3", "manifest acme", "document acme"}
    assert get_text(store, "acme", OTHER_DOC)
    with database.reading() as session:
        assert session.scalars(select(SnapshotRow.snapshot_id)).all() == [kept]
        assert {item.job_id for item in session.scalars(select(ItemRow))} == {other_job}
        assert len(session.scalars(select(AnswerRow)).all()) == 1
        assert [reading.job_id for reading in session.scalars(select(ReadingRow))] == [other_job]
        lost = session.scalars(select(SourceRow).filter_by(job_id=job_id)).one()
        assert (lost.name, lost.document_id, lost.error_code) == ("contract.pdf", None, "forgotten")
        assert {row.state for row in job_report(session, "acme", job_id)} == {"unreadable"}
        assert job_status(session, "acme", job_id).finished_at == later(1)
        tomb = session.scalars(select(TombstoneRow)).one()
        assert (tomb.tenant, tomb.document_id, tomb.at) == ("acme", DOC, later(1))
        assert tomb.counts == vars(counts)
        last = session.scalars(select(LineageRow).order_by(LineageRow.id.desc()).limit(1)).one()
        assert (last.event, last.document_id) == ("forgotten", DOC)


def test_a_forgotten_document_is_unknown_and_may_come_back(database: Database, store: FolderStore) -> None:
    answered_job(database, store_snapshot(database, store, 1))
    forget_document(database, store, "acme", DOC, now=NOW)

    with pytest.raises(DocumentUnknown):
        forget_document(database, store, "acme", DOC, now=NOW)
    answered_job(database, store_snapshot(database, store, 1))


def test_forgetting_ends_readers_and_writers(database: Database, store: FolderStore) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    answered_job(database, snapshot_id)
    running = claim(database, "late-worker")
    use(database, snapshot_id, 0, lease_s=9000)
    with database.writing() as session:
        row = find_or_create(session, fingerprint(weights="other"), num_tokens=4, now=NOW)
        writing = claim_writing(session, row.snapshot_id, owner="w9", now=NOW, lease_s=9000)
    assert writing is not None

    forget_document(database, store, "acme", DOC, now=NOW)

    assert objects(store) == set()
    entry = store_chunk(database, store, 5)
    with database.writing() as session:
        assert not answer_item(session, running[0].item_id, owner="late-worker", answer=answer(), now=NOW)
        assert not publish(
            session, writing, manifest((entry,)), manifest_sha256="5" * 64, computed_tokens=4, prefill_s=1.0, now=NOW
        )


def test_an_erasure_that_is_cut_off_is_ended_by_the_next(
    database: Database, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    put_text(store, "acme", DOC, "The fee is 7.")
    answered_job(database, snapshot_id)

    def cut_off(key: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "delete", cut_off)
        forget_document(database, store, "acme", DOC, now=NOW)
    assert state_of(database, snapshot_id) == REMOVED

    assert forget_document(database, store, "acme", DOC, now=NOW).documents == 1
    assert objects(store) == set()


def test_another_tenant_is_untouched(database: Database, store: FolderStore) -> None:
    own = store_snapshot(database, store, 1)
    others = store_snapshot(database, store, 2, tenant="other")
    for tenant, snapshot_id in (("acme", own), ("other", others)):
        put_text(store, tenant, DOC, "The fee is 7.")
        answered_job(database, snapshot_id, tenant=tenant)

    forget_document(database, store, "acme", DOC, now=NOW)

    assert objects(store) == {"2", "manifest other", "document other"}
    assert state_of(database, others) == READY
    with database.reading() as session:
        assert {row.tenant for row in session.scalars(select(ItemRow))} == {"other"}
        assert session.scalars(select(SourceRow).filter_by(tenant="other")).one().error is None


def test_forgetting_a_tenant_leaves_nothing_of_it(database: Database, store: FolderStore) -> None:
    for number, document_id in enumerate((DOC, OTHER_DOC)):
        put_text(store, "acme", document_id, "The fee is 7.")
        answered_job(
            database, store_snapshot(database, store, number, document_id=document_id), document_id=document_id
        )
    store_chunk(database, store, 8)
    store.put(f"manifests/acme/{DOC}/{'ab' * 32}.json", b"{}")
    others = store_snapshot(database, store, 9, tenant="other")

    counts = forget_tenant(database, store, "acme", now=NOW)

    assert counts == Forgotten(documents=2, sources=2, items=4, answers=2, snapshots=2, chunks=3)
    assert objects(store) == {"9", "manifest other"}
    assert state_of(database, others) == READY
    with database.reading() as session:
        assert session.scalars(select(TombstoneRow)).one().document_id is None


def test_lifetimes_come_from_the_settings() -> None:
    settings = StorageSettings(snapshot_ttl_s=1, snapshot_max_age_s=2, sweep_grace_s=3, store_budget_mb=4)

    assert Lifetimes.of(settings) == Lifetimes(ttl_s=1, max_age_s=2, grace_s=3, budget_bytes=4_000_000)
    assert Lifetimes.of(StorageSettings()) == LIFETIMES
