"""A snapshot as one file: whole on the other side, or refused with the reason and nothing changed."""

import io
import tarfile
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
from sqlalchemy import select

from storage.archive import export_snapshot, import_snapshot
from storage.database import Database
from storage.errors import ArchiveRefused, SnapshotCorrupt
from storage.lineage import snapshot_lineage
from storage.loading import get_chunks
from storage.manifest import Manifest
from storage.objects import FolderStore
from storage.schema import ChunkRow, SnapshotRow, SnapshotState
from storage.settings import StorageSettings
from storage.snapshots import claim_writing, find_or_create, get_manifest
from tests.storage.made_rows import NOW, fingerprint
from tests.storage.stored_snapshots import chunk, look, objects, store_snapshot

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Written on another machine."""
    path = tmp_path / "snapshot.tar"
    with closing(Database(StorageSettings(data_dir=tmp_path / "elsewhere"))) as database:
        database.upgrade()
        store = FolderStore(tmp_path / "elsewhere" / "objects")
        row = look(database, store_snapshot(database, store, 1, 2))
        assert export_snapshot(store, row, path) == path.stat().st_size
    return path


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


def take(database: Database, store: FolderStore, path: Path, *, tenant: str = "acme") -> SnapshotRow:
    return import_snapshot(database, store, path, tenant=tenant, owner="import", now=NOW)


def rewrite(path: Path, change: Callable[[Members], None]) -> None:
    with tarfile.open(path) as tar:
        members: Members = [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(path, "w") as tar:
        for member, data in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))


def rewrite_manifest(path: Path, **changes: object) -> None:
    """As somebody would who means harm: with a digest that is right."""

    def change(members: Members) -> None:
        made = Manifest.decode(members[0][1], "manifest").model_copy(update=changes)
        data = made.encode()
        members[0] = (tarfile.TarInfo(f"manifest-{sha256(data).hexdigest()}.json"), data)

    rewrite(path, change)


def test_what_was_exported_is_ready_after_the_import(database: Database, store: FolderStore, exported: Path) -> None:
    row = take(database, store, exported)

    assert row.state == SnapshotState.READY
    assert [data for _, data in get_chunks(store, get_manifest(store, row).chunks)] == [chunk(1)[1], chunk(2)[1]]
    with database.reading() as session:
        assert [event.event for event in snapshot_lineage(session, row)] == ["imported"]
        assert len(session.scalars(select(ChunkRow)).all()) == 2


def test_importing_twice_is_importing_once(database: Database, store: FolderStore, exported: Path) -> None:
    first = take(database, store, exported)

    assert take(database, store, exported).snapshot_id == first.snapshot_id


def test_a_damaged_snapshot_is_not_exported(database: Database, store: FolderStore, tmp_path: Path) -> None:
    row = look(database, store_snapshot(database, store, 1, 2))
    store.put(chunk(2)[0].object_key, bytes(100))

    with pytest.raises(SnapshotCorrupt):
        export_snapshot(store, row, tmp_path / "snapshot.tar")

    assert not list(tmp_path.glob("snapshot.tar*"))


def flip(index: int) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        member, data = members[index]
        members[index] = (member, data[:50] + bytes([data[50] ^ 1]) + data[51:])

    return change


def drop_last(members: Members) -> None:
    members.pop()


def add(name: str, kind: bytes = tarfile.REGTYPE) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        member = tarfile.TarInfo(name)
        member.type = kind
        member.linkname = "/etc/passwd"
        members.append((member, b"1"))

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip(0), "manifest is damaged"),
        (flip(2), "is damaged"),
        (add("../../etc/cron.d/job"), "more than a snapshot"),
        (add("/etc/passwd"), "more than a snapshot"),
        (add("notes.txt"), "more than a snapshot"),
        (add(f"chunks/{7:064x}.safetensors"), "more than a snapshot"),
        (add(f"chunks/{7:064x}.safetensors", tarfile.SYMTYPE), "more than a snapshot"),
        (lambda members: members.reverse(), "does not begin with a manifest"),
        (lambda members: members.insert(1, members.pop(2)), "not where it belongs"),
        (lambda members: members.clear(), "does not begin with a manifest"),
        (drop_last, "not where it belongs"),
        (lambda members: members.append(members[1]), "more than a snapshot"),
    ],
)
def test_a_file_that_was_changed_is_refused_and_nothing_is_kept(
    database: Database, store: FolderStore, exported: Path, change: Callable[[Members], None], reason: str
) -> None:
    rewrite(exported, change)

    with pytest.raises(ArchiveRefused, match=reason):
        take(database, store, exported)

    assert objects(store) == set()
    with database.reading() as session:
        assert session.scalars(select(SnapshotRow)).all() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": fingerprint(document_id="../../up").fields()}, "document id"),
        ({"fingerprint": {**fingerprint().fields(), "extra": "1"}}, "other fields"),
        ({"fingerprint": {**fingerprint().fields(), "format_version": 99}}, "format 99"),
        ({"fingerprint": {**fingerprint().fields(), "codec": 3}}, "other types"),
        ({"num_tokens": 9}, "all tokens"),
        ({"chunks": (chunk(1)[0], chunk(2)[0])}, "do not follow"),
        ({"chunks": (chunk(1)[0].model_copy(update={"key": "../../up"}), chunk(2, 4)[0])}, "do not follow"),
        ({"chunks": (chunk(1)[0].model_copy(update={"sha256": "0" * 64}), chunk(2, 4)[0])}, "is damaged"),
        ({"chunks": ()}, "all tokens"),
    ],
)
def test_a_manifest_that_lies_is_refused(
    database: Database, store: FolderStore, exported: Path, changes: dict[str, object], reason: str
) -> None:
    rewrite_manifest(exported, **changes)

    with pytest.raises(ArchiveRefused, match=reason):
        take(database, store, exported)

    assert objects(store) == set()


def test_another_tenant_is_refused(database: Database, store: FolderStore, exported: Path) -> None:
    with pytest.raises(ArchiveRefused, match="tenant acme"):
        take(database, store, exported, tenant="other")


def test_a_stored_chunk_is_not_replaced_by_different_bytes(
    database: Database, store: FolderStore, exported: Path
) -> None:
    take(database, store, exported)
    with database.writing() as session:
        session.scalars(select(ChunkRow)).first().sha256 = "0" * 64  # type: ignore[union-attr]

    with pytest.raises(ArchiveRefused, match="stored here already"):
        take(database, store, exported)


def test_a_snapshot_that_is_being_written_is_left_to_its_writer(
    database: Database, store: FolderStore, exported: Path
) -> None:
    with database.writing() as session:
        row = find_or_create(session, fingerprint(), num_tokens=8, now=NOW)
        claim_writing(session, row.snapshot_id, owner="w1", now=NOW, lease_s=60)

    with pytest.raises(ArchiveRefused, match="just being read"):
        take(database, store, exported)

    assert objects(store) == set()


@pytest.mark.parametrize("content", [None, b"", b"not a tar file" * 100])
def test_what_is_no_tar_file_is_refused(
    database: Database, store: FolderStore, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "some.tar"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ArchiveRefused, match=r"some\.tar"):
        take(database, store, path)
