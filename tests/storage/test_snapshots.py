"""Snapshots on both databases: one writer, published whole, never loaded damaged."""

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.database import Database
from storage.errors import ObjectMissing, SnapshotCorrupt, SnapshotMissing
from storage.items import answer_item
from storage.loading import get_chunks, load_chunks
from storage.manifest import ChunkEntry, Manifest, describe_chunk, manifest_object_key
from storage.objects import FolderStore
from storage.progress import Reading, job_readings
from storage.schema import ChunkRow, ReadingRow, SnapshotChunkRow, SnapshotRow, SnapshotState
from storage.settings import StorageSettings
from storage.snapshots import (
    WriteClaim,
    abandon_writing,
    add_chunk,
    claim_writing,
    find_or_create,
    forget_chunk,
    get_manifest,
    get_snapshot,
    known_chunks,
    note_progress,
    note_readings,
    note_used,
    publish,
    put_manifest,
    quarantine,
    renew_writing,
)
from tests.storage.made_rows import (
    NOW,
    OTHER_DOC,
    answer,
    claim,
    entry,
    fingerprint,
    later,
    manifest,
    race,
    source,
    submit,
)


def create(database: Database, *, num_tokens: int = 8, **changes: str) -> SnapshotRow:
    with database.writing() as session:
        return find_or_create(session, fingerprint(**changes), num_tokens=num_tokens, now=NOW)


def claim_write(database: Database, snapshot_id: int, owner: str = "w1", seconds: float = 0) -> WriteClaim | None:
    with database.writing() as session:
        return claim_writing(session, snapshot_id, owner=owner, now=later(seconds), lease_s=60)


def must_claim(database: Database, snapshot_id: int, owner: str = "w1", seconds: float = 0) -> WriteClaim:
    claimed = claim_write(database, snapshot_id, owner, seconds)
    assert claimed is not None
    return claimed


def look(database: Database, snapshot_id: int) -> SnapshotRow:
    with database.reading() as session:
        return get_snapshot(session, snapshot_id)


def values(row: SnapshotRow) -> dict[str, object]:
    return {name: value for name, value in vars(row).items() if name != "_sa_instance_state"}


def publish_all(database: Database, claimed: WriteClaim, made: Manifest, *, sha256: str = "5" * 64) -> bool:
    with database.writing() as session:
        for chunk in made.chunks:
            add_chunk(session, "acme", chunk, NOW)
        return publish(session, claimed, made, manifest_sha256=sha256, computed_tokens=6, prefill_s=1.5, now=later(30))


def chunk_list(database: Database, snapshot_id: int) -> list[tuple[int, str]]:
    with database.reading() as session:
        rows = session.scalars(
            select(SnapshotChunkRow).filter_by(snapshot_id=snapshot_id).order_by(SnapshotChunkRow.position)
        ).all()
    return [(row.position, row.chunk_key) for row in rows]


def test_all_who_ask_at_the_same_time_get_one_row(database: Database) -> None:
    rows = race(lambda _: create(database), 16)

    assert len({row.snapshot_id for row in rows}) == 1
    with database.reading() as session:
        (row,) = session.scalars(select(SnapshotRow)).all()
    assert (row.state, row.fence, row.attempts, row.owner) == ("writing", 0, 0, None)
    assert row.fields == fingerprint().fields()
    assert row.fingerprint == fingerprint().digest()


def test_whatever_changes_the_numbers_has_a_row_of_its_own(database: Database) -> None:
    rows = [
        create(database),
        create(database, weights="other"),
        create(database, tenant="other"),
        create(database, document_id=OTHER_DOC),
    ]

    assert len({row.snapshot_id for row in rows}) == 4


def test_a_row_that_is_there_is_left_as_it_is(database: Database) -> None:
    row = create(database)
    must_claim(database, row.snapshot_id)
    before = values(look(database, row.snapshot_id))

    again = create(database, num_tokens=999)

    assert values(again) == before


def test_a_snapshot_that_never_was_is_missing(database: Database) -> None:
    with database.reading() as session, pytest.raises(SnapshotMissing, match="never made") as caught:
        get_snapshot(session, 4711)

    assert caught.value.key == "4711"


def test_of_all_who_want_to_write_one_may(database: Database) -> None:
    row = create(database)

    claims = race(lambda number: claim_write(database, row.snapshot_id, f"w{number}"), 16)

    (won,) = [claimed for claimed in claims if claimed]
    assert won == WriteClaim(row.snapshot_id, fence=1, attempt=1)
    found = look(database, row.snapshot_id)
    assert (found.owner, found.lease_until) == (f"w{claims.index(won)}", later(60))


def test_a_lease_that_ran_out_can_be_taken_by_one(database: Database) -> None:
    row = create(database)
    must_claim(database, row.snapshot_id, "dead")
    assert claim_write(database, row.snapshot_id, "w2", 60) is None

    claims = race(lambda number: claim_write(database, row.snapshot_id, f"w{number}", 61), 8)

    assert [claimed for claimed in claims if claimed] == [WriteClaim(row.snapshot_id, fence=2, attempt=2)]


def test_a_renewed_lease_cannot_be_taken(database: Database) -> None:
    row, other = create(database), create(database, document_id=OTHER_DOC)
    must_claim(database, row.snapshot_id, "w1")
    must_claim(database, other.snapshot_id, "w2")

    with database.writing() as session:
        renew_writing(session, "w1", now=later(50), lease_s=60)

    assert claim_write(database, row.snapshot_id, "w3", 110) is None
    assert claim_write(database, other.snapshot_id, "w3", 110) is not None
    assert claim_write(database, row.snapshot_id, "w3", 111) is not None


def test_a_ready_snapshot_is_not_written_again(database: Database) -> None:
    row = create(database)
    claimed = must_claim(database, row.snapshot_id)
    assert publish_all(database, claimed, manifest())
    with database.writing() as session:
        renew_writing(session, "w1", now=later(1), lease_s=1)

    assert claim_write(database, row.snapshot_id, "w2", 10_000) is None


def test_publishing_writes_the_chunks_in_order_and_what_it_cost(database: Database) -> None:
    row = create(database)
    made = manifest((entry(9), entry(2), entry(5)))
    claimed = must_claim(database, row.snapshot_id)

    assert publish_all(database, claimed, made)

    assert chunk_list(database, row.snapshot_id) == [(n, chunk.key) for n, chunk in enumerate(made.chunks)]
    found = look(database, row.snapshot_id)
    assert (found.state, found.owner, found.lease_until) == ("ready", None, None)
    assert (found.size_bytes, found.manifest_sha256) == (109 + 102 + 105, "5" * 64)
    assert (found.computed_tokens, found.done_tokens, found.prefill_s) == (6, made.num_tokens, 1.5)
    assert (found.ready_at, found.last_used_at) == (later(30), later(30))


def test_only_a_proved_load_forgets_earlier_attempts(database: Database) -> None:
    row = create(database)
    publish_all(database, must_claim(database, row.snapshot_id), manifest())
    assert look(database, row.snapshot_id).attempts == 1

    with database.writing() as session:
        note_used(session, row.snapshot_id, later(60))

    found = look(database, row.snapshot_id)
    assert (found.attempts, found.last_used_at) == (0, later(60))


def test_publishing_again_replaces_the_list_of_chunks(database: Database) -> None:
    row = create(database)
    publish_all(database, must_claim(database, row.snapshot_id), manifest((entry(0), entry(1), entry(2))))
    with database.writing() as session:
        quarantine(session, row.snapshot_id, "damaged")

    assert publish_all(database, must_claim(database, row.snapshot_id), manifest((entry(3), entry(1))))

    assert chunk_list(database, row.snapshot_id) == [(0, entry(3).key), (1, entry(1).key)]


def test_progress_is_seen_and_begins_anew_with_another_writer(database: Database) -> None:
    row = create(database)
    claimed = must_claim(database, row.snapshot_id)
    with database.writing() as session:
        note_progress(session, claimed, 4)
    assert look(database, row.snapshot_id).done_tokens == 4

    must_claim(database, row.snapshot_id, "w2", 61)

    assert look(database, row.snapshot_id).done_tokens == 0


def late_calls(claimed: WriteClaim) -> list[Callable[[Session], object]]:
    return [
        lambda session: note_progress(session, claimed, 7),
        lambda session: abandon_writing(session, claimed, state=SnapshotState.WRITING, error=None),
        lambda session: abandon_writing(session, claimed, state=SnapshotState.FAILED, error="No."),
        lambda session: publish(
            session, claimed, manifest(), manifest_sha256="6" * 64, computed_tokens=1, prefill_s=9.0, now=later(99)
        ),
        lambda session: renew_writing(session, "slow", now=later(99), lease_s=999),
    ]


@pytest.mark.parametrize("now_is", ["being written", "ready", "abandoned", "failed"])
def test_an_overtaken_writer_changes_nothing(database: Database, now_is: str) -> None:
    row = create(database)
    overtaken = must_claim(database, row.snapshot_id, "slow")
    winner = must_claim(database, row.snapshot_id, "fast", 61)
    if now_is == "ready":
        assert publish_all(database, winner, manifest((entry(4),)))
    elif now_is != "being written":
        state = SnapshotState.WRITING if now_is == "abandoned" else SnapshotState.FAILED
        with database.writing() as session:
            abandon_writing(session, winner, state=state, error=now_is)
    before, chunks_before = values(look(database, row.snapshot_id)), chunk_list(database, row.snapshot_id)

    for call in late_calls(overtaken):
        with database.writing() as session:
            for chunk in manifest().chunks:
                add_chunk(session, "acme", chunk, NOW)
            assert not call(session)

    assert values(look(database, row.snapshot_id)) == before
    assert chunk_list(database, row.snapshot_id) == chunks_before


def test_a_writer_cannot_take_back_what_it_published(database: Database) -> None:
    """As it tries when the connection breaks just after the commit and it cannot know that it succeeded."""
    row = create(database)
    claimed = must_claim(database, row.snapshot_id, "slow")
    publish_all(database, claimed, manifest())
    before = values(look(database, row.snapshot_id))

    for call in late_calls(claimed):
        with database.writing() as session:
            assert not call(session)

    assert values(look(database, row.snapshot_id)) == before


def test_what_is_abandoned_can_be_written_at_once(database: Database) -> None:
    row = create(database)
    claimed = must_claim(database, row.snapshot_id)
    with database.writing() as session:
        abandon_writing(session, claimed, state=SnapshotState.WRITING, error=None)

    assert claim_write(database, row.snapshot_id, "w2") == WriteClaim(row.snapshot_id, fence=2, attempt=2)


def test_what_failed_says_why_and_may_be_tried_anew(database: Database) -> None:
    row = create(database)
    for seconds in (0, 61, 122):
        claimed = must_claim(database, row.snapshot_id, f"w{seconds}", seconds)
    assert claimed.attempt == 3

    with database.writing() as session:
        abandon_writing(session, claimed, state=SnapshotState.FAILED, error="Reading failed.")

    found = look(database, row.snapshot_id)
    assert (found.state, found.error, found.owner) == ("failed", "Reading failed.", None)
    assert claim_write(database, row.snapshot_id, "w9", 122) == WriteClaim(row.snapshot_id, fence=4, attempt=1)
    assert look(database, row.snapshot_id).error is None


def test_a_damaged_snapshot_is_out_of_use_and_written_again(database: Database) -> None:
    row = create(database)
    publish_all(database, must_claim(database, row.snapshot_id), manifest())

    with database.writing() as session:
        quarantine(session, row.snapshot_id, "Snapshot x is damaged.")

    found = look(database, row.snapshot_id)
    assert (found.state, found.error) == ("quarantined", "Snapshot x is damaged.")
    claims = race(lambda number: claim_write(database, row.snapshot_id, f"w{number}"), 8)
    (won,) = [claimed for claimed in claims if claimed]
    assert publish_all(database, won, manifest())
    assert look(database, row.snapshot_id).state == "ready"
    assert look(database, row.snapshot_id).error is None


def test_only_a_ready_snapshot_is_quarantined(database: Database) -> None:
    row = create(database)
    must_claim(database, row.snapshot_id)
    before = values(look(database, row.snapshot_id))

    with database.writing() as session:
        quarantine(session, row.snapshot_id, "late")

    assert values(look(database, row.snapshot_id)) == before


def test_known_chunks_are_the_leading_run(database: Database) -> None:
    keys = [entry(n).key for n in range(5)]
    with database.writing() as session:
        for number in (4, 0, 3, 1):
            add_chunk(session, "acme", entry(number), NOW)

    with database.reading() as session:
        assert [row.chunk_key for row in known_chunks(session, keys)] == keys[:2]
        assert [row.chunk_key for row in known_chunks(session, keys[3:])] == keys[3:]
        assert known_chunks(session, keys[2:]) == []
        assert known_chunks(session, []) == []


def test_a_forgotten_chunk_ends_the_run_and_is_in_no_snapshot(database: Database) -> None:
    row, other = create(database), create(database, document_id=OTHER_DOC)
    chunks = (entry(0), entry(1), entry(2))
    publish_all(database, must_claim(database, row.snapshot_id), manifest(chunks))
    publish_all(database, must_claim(database, other.snapshot_id), manifest(chunks[:2]))

    with database.writing() as session:
        forget_chunk(session, entry(1).key)
        forget_chunk(session, "f" * 64)

    with database.reading() as session:
        assert [found.chunk_key for found in known_chunks(session, [chunk.key for chunk in chunks])] == [entry(0).key]
    assert chunk_list(database, row.snapshot_id) == [(0, entry(0).key), (2, entry(2).key)]
    assert chunk_list(database, other.snapshot_id) == [(0, entry(0).key)]


def test_a_chunk_stored_again_has_what_was_noted_last(database: Database) -> None:
    changed = entry(0, xxh3="e" * 32, size_bytes=77)
    for made in (entry(0), changed):
        with database.writing() as session:
            add_chunk(session, "acme", made, NOW)

    with database.reading() as session:
        (row,) = session.scalars(select(ChunkRow)).all()
    assert (row.tenant, row.num_tokens, row.size_bytes, row.xxh3) == ("acme", 4, 77, "e" * 32)
    assert row.sha256 == entry(0).sha256


def test_documents_with_one_beginning_may_note_its_chunks_at_the_same_time(database: Database) -> None:
    def write(_: int) -> None:
        for number in range(5):
            with database.writing() as session:
                add_chunk(session, "acme", entry(number), NOW)

    race(write, 8)

    with database.reading() as session:
        assert len(known_chunks(session, [entry(n).key for n in range(5)])) == 5


def readings(database: Database, job_id: str) -> list[Reading]:
    with database.reading() as session:
        return job_readings(session, "acme", job_id)


def note(database: Database, row: SnapshotRow, computed_tokens: int, prefill_s: float = 0.0) -> None:
    with database.writing() as session:
        note_readings(session, row, model="tiny", computed_tokens=computed_tokens, prefill_s=prefill_s, now=NOW)


def test_what_was_computed_is_charged_to_the_oldest_job_and_the_others_found_it(database: Database) -> None:
    row = create(database, num_tokens=1000)
    oldest, second, third = (submit(database) for _ in range(3))
    elsewhere = [submit(database, sources=[source(OTHER_DOC)]), submit(database, tenant="other")]

    note(database, row, 900, 2.5)

    (computed,) = readings(database, oldest)
    assert (computed.way, computed.computed_tokens, computed.reused_tokens) == ("computed", 900, 100)
    assert (computed.prefill_s, computed.num_tokens, computed.ready) == (2.5, 1000, False)
    for job_id in (second, third):
        (found,) = readings(database, job_id)
        assert (found.way, found.computed_tokens, found.reused_tokens) == ("found", 0, 1000)
        assert found.prefill_s == 0.0
    assert [readings(database, job_id) for job_id in elsewhere] == [[], []]


def test_a_job_that_needs_the_document_no_more_is_not_charged(database: Database) -> None:
    row = create(database, num_tokens=1000)
    finished, waiting = submit(database, questions=1), submit(database, questions=1)
    (item,) = claim(database, limit=1)
    with database.writing() as session:
        answer_item(session, item.item_id, owner="worker-1", answer=answer(), now=NOW)

    note(database, row, 1000, 1.0)

    assert readings(database, finished) == []
    assert [reading.computed_tokens for reading in readings(database, waiting)] == [1000]


def test_the_first_record_of_a_job_stays(database: Database) -> None:
    row = create(database, num_tokens=1000)
    job_id = submit(database)
    note(database, row, 1000, 2.0)

    note(database, row, 0)
    note(database, row, 500, 9.0)

    (reading,) = readings(database, job_id)
    assert (reading.way, reading.computed_tokens, reading.prefill_s) == ("computed", 1000, 2.0)


def test_records_add_up_when_a_damaged_snapshot_is_computed_again(database: Database) -> None:
    row = create(database, num_tokens=1000)
    submit(database)
    note(database, row, 1000, 2.0)
    submit(database)
    submit(database)

    note(database, row, 800, 1.0)

    with database.reading() as session:
        rows = session.scalars(select(ReadingRow)).all()
    assert sorted(row.computed_tokens for row in rows) == [0, 800, 1000]
    assert sum(row.prefill_s for row in rows) == 3.0


def test_readers_that_race_leave_one_record_a_job(database: Database) -> None:
    row = create(database, num_tokens=1000)
    jobs = [submit(database) for _ in range(3)]

    race(lambda _: note(database, row, 0), 8)

    assert [len(readings(database, job_id)) for job_id in jobs] == [1, 1, 1]


class Memory:
    """Takes parts in views of a few bytes each."""

    def __init__(self, entries: Sequence[ChunkEntry]) -> None:
        self.contents = [bytearray(entry.size_bytes) for entry in entries]
        self.accepted: list[tuple[int, int, int]] = []
        self.in_place = True

    def views(self, chunk: int, start: int, stop: int) -> list[memoryview]:
        view = memoryview(self.contents[chunk])
        return [view[at : min(at + 7, stop)] for at in range(start, stop, 7)]

    def accept(self, chunk: int, start: int, stop: int) -> None:
        self.accepted.append((chunk, start, stop))


class Stored:
    """A published snapshot of six chunks in a folder."""

    def __init__(self, database: Database, root: Path) -> None:
        self.root = root
        self.store = FolderStore(root)
        self.contents = [bytes([n]) * 50 + n.to_bytes(4, "big") for n in range(6)]
        entries = []
        for number, data in enumerate(self.contents):
            chunk = describe_chunk(f"{number:064x}", 4 * number, 4 * number + 4, data, [20, 54])
            self.store.put(chunk.object_key, data)
            entries.append(chunk)
        self.manifest = manifest(tuple(entries), fingerprint=fingerprint().fields())
        made = create(database, num_tokens=24)
        digest = put_manifest(self.store, made, self.manifest)
        assert publish_all(database, must_claim(database, made.snapshot_id), self.manifest, sha256=digest)
        self.row = look(database, made.snapshot_id)
        self.manifest_key = manifest_object_key(self.row.tenant, self.row.document_id, self.row.fingerprint)

    @property
    def object_keys(self) -> list[str]:
        return [self.manifest_key, *(chunk.object_key for chunk in self.manifest.chunks)]

    def load(self) -> list[bytes]:
        """By parts, as for a model; read whole, as for an archive, it has to come to the same."""
        entries = get_manifest(self.store, self.row).chunks
        receiver = Memory(entries)
        load_chunks(self.store, entries, receiver)
        assert [data for _, data in get_chunks(self.store, entries)] == receiver.contents
        return [bytes(data) for data in receiver.contents]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    # What is loaded does not depend on the database, so one will do.
    with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
        database.upgrade()
        return Stored(database, tmp_path / "objects")


def test_a_snapshot_is_loaded_as_it_was_stored_and_in_order(stored: Stored) -> None:
    assert get_manifest(stored.store, stored.row) == stored.manifest
    assert stored.load() == stored.contents


def test_a_manifest_published_on_either_database_is_read_back(database: Database, tmp_path: Path) -> None:
    """The fingerprint's fields go through the database as JSON and must come back equal."""
    made = Stored(database, tmp_path / "objects")

    assert made.load() == made.contents


def each_object(stored: Stored, damage: Callable[[bytes], bytes | None]) -> None:
    """Damages every object in turn, and expects every load to say so, naming the object."""
    for key in stored.object_keys:
        data = stored.store.get(key)
        wrong = damage(data)
        if wrong is None:
            stored.store.delete(key)
        else:
            stored.store.put(key, wrong)
        with pytest.raises((SnapshotCorrupt, ObjectMissing)) as caught:
            stored.load()
        assert type(caught.value) is (ObjectMissing if wrong is None else SnapshotCorrupt)
        assert caught.value.key == key
        stored.store.put(key, data)
        stored.load()


@pytest.mark.parametrize("at", [0, 25, -1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found(stored: Stored, at: int, bit: int) -> None:
    def flip(data: bytes) -> bytes:
        wrong = bytearray(data)
        wrong[at] ^= 1 << bit
        return bytes(wrong)

    each_object(stored, flip)


@pytest.mark.parametrize("left", [0, 1, -1])
def test_a_truncated_object_is_found(stored: Stored, left: int) -> None:
    each_object(stored, lambda data: data[:left])


def test_an_object_with_something_behind_it_is_found(stored: Stored) -> None:
    each_object(stored, lambda data: data + b"\n")


def test_a_deleted_object_is_missing(stored: Stored) -> None:
    each_object(stored, lambda _: None)


def test_swapped_objects_are_found(stored: Stored) -> None:
    keys = stored.object_keys
    for one, other in pairwise(keys):
        data, other_data = stored.store.get(one), stored.store.get(other)
        stored.store.put(one, other_data)
        stored.store.put(other, data)
        with pytest.raises(SnapshotCorrupt) as caught:
            stored.load()
        assert caught.value.key in (one, other)
        stored.store.put(one, data)
        stored.store.put(other, other_data)


def test_a_manifest_of_another_snapshot_is_found(stored: Stored) -> None:
    """Sound in itself, and lying where this one should: an old version, or copied to the wrong place."""
    other = stored.manifest.model_copy(update={"fingerprint": fingerprint(weights="other").fields()})
    digest = put_manifest(stored.store, stored.row, other)

    with pytest.raises(SnapshotCorrupt, match="damaged") as caught:
        get_manifest(stored.store, stored.row)
    assert (caught.value.expected, caught.value.actual) == (stored.row.manifest_sha256, digest)

    stored.row.manifest_sha256 = digest
    with pytest.raises(SnapshotCorrupt, match="the fingerprint of its row"):
        get_manifest(stored.store, stored.row)


def test_a_snapshot_that_was_never_published_has_no_manifest_to_trust(stored: Stored) -> None:
    stored.row.manifest_sha256 = None

    with pytest.raises(SnapshotCorrupt, match="expected a digest"):
        get_manifest(stored.store, stored.row)


def test_chunks_before_the_damaged_one_are_handed_out(stored: Stored) -> None:
    """So that a prefill can build on them."""
    chunks = stored.manifest.chunks
    stored.store.put(chunks[4].object_key, b"damaged")
    seen = []

    with pytest.raises(SnapshotCorrupt):
        for chunk, _ in get_chunks(stored.store, chunks):
            seen.append(chunk)

    assert seen == list(chunks[:4])


def test_the_first_layers_of_all_chunks_come_first(stored: Stored) -> None:
    entries = stored.manifest.chunks
    receiver = Memory(entries)

    load_chunks(stored.store, entries, receiver, threads=1)

    assert receiver.accepted == [
        *((chunk, 0, 20) for chunk in range(len(entries))),
        *((chunk, 20, 54) for chunk in range(len(entries))),
    ]


def test_nothing_damaged_is_accepted(stored: Stored) -> None:
    entries = stored.manifest.chunks
    wrong = bytearray(stored.contents[2])
    wrong[30] ^= 1
    stored.store.put(entries[2].object_key, bytes(wrong))
    receiver = Memory(entries)

    with pytest.raises(SnapshotCorrupt):
        load_chunks(stored.store, entries, receiver)

    assert (2, 20, 54) not in receiver.accepted


def test_a_damaged_copy_is_dropped_and_the_store_asked(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = stored.manifest.chunks
    stored.store.put(entries[1].object_key, b"damaged copy")

    def drop_copy(key: str) -> bool:
        stored.store.put(key, stored.contents[1])
        return True

    monkeypatch.setattr(stored.store, "drop_copy", drop_copy)

    assert stored.load() == stored.contents


def test_parts_that_leave_bytes_out_are_refused(stored: Stored) -> None:
    short = stored.manifest.chunks[0].model_copy(update={"parts": stored.manifest.chunks[0].parts[:1]})

    with pytest.raises(SnapshotCorrupt, match="parts of 54 bytes"):
        load_chunks(stored.store, [short], Memory([short]))
