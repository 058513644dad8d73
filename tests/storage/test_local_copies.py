"""Local copies: what they spare, that they never stand in the way, and that they go."""

import errno
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import storage.objects.local_copies
from pipeline.local_servers import SeaweedFS
from storage.database import Database
from storage.documents import put_text
from storage.errors import ObjectMissing, ObjectStoreError, StoreUnavailable
from storage.forget import forget_document
from storage.manifest import chunk_object_key
from storage.objects import FolderStore, LocalCopies, open_store, without_copies
from storage.settings import StorageSettings
from storage.snapshots import get_snapshot
from storage.sweep import prune_copies
from storage.verification import chunk_digests, verify_snapshot
from tests.storage.made_rows import DOC, NOW, OTHER_DOC
from tests.storage.stored_snapshots import chunk, store_snapshot

KEY = "chunks/0a.safetensors"
DATA = bytes(range(256)) * 40
PART = 1000


class Remote(FolderStore):
    """Stands for a store that is far away: counts what it is asked to read, and can stop answering."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.num_reads = 0
        self.down = False

    def get(self, key: str) -> bytes:
        self._count()
        return super().get(key)

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        self._count()
        return super().read_into(key, start, into)

    def _count(self) -> None:
        if self.down:
            raise StoreUnavailable
        self.num_reads += 1


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "remote")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "copies"


@pytest.fixture
def store(remote: Remote, folder: Path) -> Iterator[LocalCopies]:
    with closing(LocalCopies(remote, folder, 10**6)) as store:
        yield store


@pytest.fixture
def other(remote: Remote, folder: Path) -> Iterator[LocalCopies]:
    """As another process of the host has it."""
    with closing(LocalCopies(remote, folder, 10**6)) as store:
        yield store


def read_parts(store: LocalCopies, key: str = KEY, starts: Sequence[int] = range(0, len(DATA), PART)) -> bytes:
    """The object's parts from these starts on, one after the other."""
    whole = bytearray(len(DATA))
    for start in starts:
        with memoryview(whole)[start : start + PART] as view:
            assert store.read_into(key, start, [view[:300], view[300:]]) == len(DATA)
    return bytes(whole)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "chunks").glob("*")}


def partials(folder: Path) -> list[Path]:
    return [*(folder / ".partial").glob("*")]


def use_at(folder: Path, name: str, seconds: float) -> None:
    os.utime(folder / "chunks" / name, (seconds, seconds))


def break_disk(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)


def test_what_was_read_in_parts_is_not_read_again(remote: Remote, store: LocalCopies, other: LocalCopies) -> None:
    remote.put(KEY, DATA)
    starts = [*range(0, len(DATA), PART)]

    assert read_parts(store, starts=starts[::-1]) == DATA
    assert remote.num_reads == len(starts)

    assert read_parts(store) == read_parts(other) == store.get(KEY) == DATA
    assert remote.num_reads == len(starts)


def test_what_was_got_or_put_is_not_read_again(remote: Remote, store: LocalCopies, other: LocalCopies) -> None:
    remote.put(KEY, DATA)
    assert store.get(KEY) == DATA
    store.put("chunks/0b", DATA)

    for reader in (store, other):
        assert read_parts(reader) == read_parts(reader, "chunks/0b") == DATA
    assert remote.num_reads == 1


def test_who_finds_a_copy_that_another_process_made_leaves_nothing_half_written(
    remote: Remote, store: LocalCopies, other: LocalCopies, folder: Path
) -> None:
    remote.put(KEY, DATA)
    starts = [*range(0, len(DATA), PART)]
    read_parts(store, starts=starts[:5])
    read_parts(other)

    read_parts(store, starts=starts[5:])

    assert remote.num_reads == 5 + len(starts)
    assert partials(folder) == []


def test_half_an_object_is_no_copy(remote: Remote, store: LocalCopies, folder: Path) -> None:
    remote.put(KEY, DATA)

    read_parts(store, starts=[*range(0, len(DATA), PART)][:-1])

    assert names(folder) == set()
    assert read_parts(store) == DATA
    assert names(folder) == {"0a.safetensors"}
    assert partials(folder) == []


def test_texts_and_manifests_lie_only_in_the_store(remote: Remote, store: LocalCopies, folder: Path) -> None:
    store.put("documents/acme/d.json", b"text")

    assert store.get("documents/acme/d.json") == store.get("documents/acme/d.json") == b"text"
    assert remote.num_reads == 2
    assert not folder.exists()


def test_nobody_else_may_read_copies(store: LocalCopies, folder: Path) -> None:
    store.put(KEY, DATA)
    read_parts(store)

    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_a_copy_that_is_dropped_is_read_from_the_store_and_made_again(
    remote: Remote, store: LocalCopies, folder: Path
) -> None:
    store.put(KEY, DATA)
    copy = folder / "chunks" / "0a.safetensors"
    copy.write_bytes(b"?" + DATA[1:])
    assert read_parts(store) != DATA

    assert store.drop_copy(KEY)

    assert not copy.exists()
    assert read_parts(store) == DATA
    assert copy.read_bytes() == DATA


def test_dropping_what_was_never_copied_says_so(remote: Remote, store: LocalCopies) -> None:
    remote.put(KEY, DATA)

    assert not store.drop_copy(KEY)
    assert not store.drop_copy("manifests/acme/d/f.json")


def test_who_read_a_copy_that_another_process_dropped_reads_again(
    store: LocalCopies, other: LocalCopies, folder: Path
) -> None:
    store.put(KEY, DATA)
    (folder / "chunks" / "0a.safetensors").write_bytes(b"?" + DATA[1:])
    assert store.get(KEY) == other.get(KEY) != DATA

    assert store.drop_copy(KEY)
    assert other.drop_copy(KEY)


def test_a_bad_copy_that_cannot_be_removed_is_not_read_again(
    store: LocalCopies, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, DATA)
    (folder / "chunks" / "0a.safetensors").write_bytes(b"?" + DATA[1:])
    store.get(KEY)
    break_disk(monkeypatch, "unlink", errno.EROFS)

    assert store.drop_copy(KEY)

    assert store.get(KEY) == read_parts(store) == DATA


def test_the_least_recently_used_copies_go_first(remote: Remote, folder: Path) -> None:
    with closing(LocalCopies(remote, folder, 1000)) as store:
        for number in range(4):
            store.put(f"chunks/{number}", bytes(200))
            use_at(folder, str(number), 1e9 + number)
        assert len(store.get("chunks/0")) == 200  # a use

        store.put("chunks/4", bytes(500))

    assert names(folder) == {"0", "3", "4"}


def test_a_copy_takes_no_more_than_the_budget(remote: Remote, folder: Path) -> None:
    with closing(LocalCopies(remote, folder, 1000)) as store:
        store.put("chunks/small", bytes(100))
        store.put("chunks/large", bytes(1001))

        assert len(store.get("chunks/large")) == 1001
        assert names(folder) == {"small"}


def test_the_budget_holds_for_all_processes_together(remote: Remote, folder: Path) -> None:
    stores = [LocalCopies(remote, folder, 100_000) for _ in range(4)]
    for number in range(400):
        stores[number % 4].put(f"chunks/{number}", bytes(700))
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 100_000

    assert len(names(folder)) > 100
    for store in stores:
        store.close()


def test_a_copy_that_is_evicted_while_it_is_read_is_read_to_its_end(
    remote: Remote, store: LocalCopies, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, DATA)
    whole_read = os.preadv

    def evict_first(*arguments: Any) -> int:
        (folder / "chunks" / "0a.safetensors").unlink(missing_ok=True)
        return whole_read(*arguments)

    monkeypatch.setattr(os, "preadv", evict_first)

    assert read_parts(store) == DATA


def test_without_a_budget_there_are_no_copies_and_old_ones_go(remote: Remote, store: LocalCopies, folder: Path) -> None:
    store.put(KEY, DATA)
    with closing(LocalCopies(remote, folder, 0)) as without:
        without.put("chunks/0b", DATA)
        assert names(folder) == {"0a.safetensors"}

        without.prune(set)

    assert names(folder) == set()


def test_racing_threads_make_one_whole_copy(remote: Remote, store: LocalCopies, folder: Path) -> None:
    keys = [f"chunks/{number}" for number in range(20)]
    for number, key in enumerate(keys):
        remote.put(key, bytes([number]) + DATA[1:])
    jobs = [(key, start) for key in keys for start in range(0, len(DATA), PART)] * 3
    secrets.SystemRandom().shuffle(jobs)

    def read(job: tuple[str, int]) -> None:
        key, start = job
        part = bytearray(PART)
        assert store.read_into(key, start, [memoryview(part)]) == len(DATA)
        assert part[1 : len(DATA) - start] == DATA[start + 1 : start + PART]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(read, jobs))

    for number, key in enumerate(keys):
        assert (folder / key).read_bytes() == bytes([number]) + DATA[1:]
    assert partials(folder) == []


def test_racing_processes_read_the_right_bytes_within_a_small_budget(remote: Remote, folder: Path) -> None:
    for number in range(20):
        remote.put(f"chunks/{number}", bytes([number]) * 50_000)
    script = f"""
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from storage.objects import FolderStore, LocalCopies
store = LocalCopies(FolderStore(Path({str(folder.parents[1] / "remote")!r})), Path({str(folder)!r}), 800_000)
def read(_):
    number = random.randrange(20)
    for start in random.sample(range(0, 50_000, 10_000), 5):
        part = bytearray(10_000)
        assert store.read_into(f"chunks/{{number}}", start, [memoryview(part)]) == 50_000
        assert part == bytes([number]) * 10_000
    if random.random() < 0.05:
        store.drop_copy(f"chunks/{{number}}")
with ThreadPoolExecutor(4) as pool:
    list(pool.map(read, range(400)))
store.close()
"""
    running = [subprocess.Popen([sys.executable, "-W", "error", "-c", script]) for _ in range(3)]

    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert names(folder)
    assert partials(folder) == []
    for path in (folder / "chunks").iterdir():
        assert path.read_bytes() == bytes([int(path.name)]) * 50_000


@pytest.mark.parametrize("call", ["ftruncate", "pwritev", "open", "scandir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_local_disk_that_fails_costs_a_line_in_the_log_and_nothing_else(
    store: LocalCopies, remote: Remote, folder: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, call: str, code: int,
) -> None:  # fmt: skip
    remote.put(KEY, DATA)
    whole_open = os.open

    def fail(path: Any, *arguments: Any, **named: Any) -> Any:
        if call == "open" and not Path(path).is_relative_to(folder):
            return whole_open(path, *arguments, **named)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, fail)
        assert read_parts(store) == store.get(KEY) == DATA
        store.put("chunks/0b", DATA)

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert remote.get("chunks/0b") == DATA
    assert names(folder) == set()
    assert partials(folder) == []


def test_a_disk_that_works_again_is_used_again(
    store: LocalCopies, remote: Remote, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put(KEY, DATA)
    with monkeypatch.context() as patch:
        break_disk(patch, "pwritev", errno.ENOSPC)
        patch.setattr(storage.objects.local_copies, "_PAUSE_S", 0.0)
        read_parts(store)

    assert read_parts(store) == DATA
    assert names(folder) == {"0a.safetensors"}


def test_a_copy_that_cannot_be_read_is_read_from_the_store(
    store: LocalCopies, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    store.put(KEY, DATA)
    whole_read = os.preadv
    copy = folder / "chunks" / "0a.safetensors"

    def fail(descriptor: int, *arguments: Any) -> int:
        if copy.exists() and os.path.sameopenfile(descriptor, os.open(copy, os.O_RDONLY)):
            raise OSError(errno.EIO, "bad block")
        return whole_read(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", fail)

    assert read_parts(store) == DATA


def test_a_store_that_fails_half_way_is_read_on_later(remote: Remote, store: LocalCopies, folder: Path) -> None:
    remote.put(KEY, DATA)
    starts = [*range(0, len(DATA), PART)]
    read_parts(store, starts=starts[:5])
    remote.down = True
    with pytest.raises(StoreUnavailable):
        read_parts(store, starts=starts[5:])
    remote.down = False

    read_parts(store, starts=starts[5:])

    assert (folder / "chunks" / "0a.safetensors").read_bytes() == DATA


def test_copies_answer_while_the_store_does_not(remote: Remote, store: LocalCopies) -> None:
    store.put(KEY, DATA)
    remote.down = True

    assert read_parts(store) == DATA


def test_what_a_killed_process_left_is_no_copy_and_is_swept(remote: Remote, store: LocalCopies, folder: Path) -> None:
    remote.put(KEY, DATA)
    script = f"""
import os
from pathlib import Path
from storage.objects import FolderStore, LocalCopies
store = LocalCopies(FolderStore(Path({str(folder.parents[1] / "remote")!r})), Path({str(folder)!r}), 10**6)
store.read_into({KEY!r}, 0, [memoryview(bytearray(5000))])
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    (left,) = partials(folder)

    assert read_parts(store) == DATA
    assert store.sweep(3600) == 0
    os.utime(left, (0, 0))
    assert store.sweep(3600) == 1
    assert partials(folder) == []


def test_what_is_left_half_written_makes_room_for_copies(remote: Remote, folder: Path) -> None:
    with closing(LocalCopies(remote, folder, 1000)) as store:
        store.put("chunks/0b", bytes(10))
        left = folder / ".partial" / "0123.name"
        left.write_bytes(bytes(900))
        store.put("chunks/0c", bytes(100))
        assert names(folder) == set()

        os.utime(left, (0, 0))
        store.put("chunks/0c", bytes(100))

    assert names(folder) == {"0c"}
    assert partials(folder) == []


def test_parts_that_were_read_long_ago_do_not_count(
    remote: Remote, store: LocalCopies, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put(KEY, DATA)
    read_parts(store, starts=[0, PART])
    monkeypatch.setattr("storage.objects.partial_copy.PARTIAL_AGE_S", 0.0)
    read_parts(store, starts=[0])  # begins anew, and others may have swept the rest
    monkeypatch.undo()

    assert len(partials(folder)) == 1
    read_parts(store, starts=[*range(0, len(DATA), PART)])
    assert names(folder) == {"0a.safetensors"}


@pytest.mark.parametrize("deleter", ["store", "other"])
def test_what_is_deleted_while_it_is_read_is_not_copied_afterwards(
    request: pytest.FixtureRequest, remote: Remote, store: LocalCopies, folder: Path, deleter: str
) -> None:
    remote.put(KEY, DATA)
    starts = [*range(0, len(DATA), PART)]
    read_parts(store, starts=starts[:5])
    whole_read = remote.read_into

    def delete_after(key: str, start: int, into: Sequence[memoryview]) -> int:
        size_bytes = whole_read(key, start, into)
        request.getfixturevalue(deleter).delete(key)
        return size_bytes

    remote.read_into = delete_after  # type: ignore[method-assign]
    read_parts(store, starts=starts[5:6])
    remote.read_into = whole_read  # type: ignore[method-assign]

    assert (names(folder), partials(folder)) == (set(), [])
    with pytest.raises(ObjectMissing):
        read_parts(store, starts=starts[6:])


def test_deleting_deletes_the_copy_even_where_the_store_does_not_answer(
    remote: Remote, store: LocalCopies, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, DATA)

    def refuse(key: str) -> None:
        raise StoreUnavailable

    monkeypatch.setattr(remote, "delete", refuse)
    with pytest.raises(StoreUnavailable):
        store.delete(KEY)

    assert names(folder) == set()


def test_a_copy_that_cannot_be_deleted_is_told(
    store: LocalCopies, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, DATA)
    with monkeypatch.context() as patch:
        break_disk(patch, "unlink", errno.EACCES)
        with pytest.raises(ObjectStoreError, match="local copy"):
            store.delete(KEY)


def test_an_object_that_is_replaced_while_it_is_read_is_not_copied(
    remote: Remote, store: LocalCopies, folder: Path
) -> None:
    remote.put(KEY, DATA)
    read_parts(store, starts=[0])
    remote.put(KEY, b"other size")

    assert store.get(KEY) == b"other size"
    assert names(folder) == set()
    assert store.get(KEY) == b"other size"
    assert (folder / "chunks" / "0a.safetensors").read_bytes() == b"other size"


def test_prune_deletes_whole_and_half_copies_of_what_is_not_known(
    remote: Remote, store: LocalCopies, other: LocalCopies, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.objects.local_copies, "_AT_ONCE", 2)
    for number in range(5):
        store.put(f"chunks/{number}", DATA)
    remote.put(KEY, DATA)
    read_parts(other, starts=[0])
    asked: list[str] = []

    def known(keys: list[str]) -> set[str]:
        asked.extend(keys)
        return {"chunks/1", "chunks/3"} & {*keys}

    assert store.prune(known) == 4

    assert sorted(asked) == sorted([*(f"chunks/{number}" for number in range(5)), KEY])
    assert names(folder) == {"1", "3"}
    assert partials(folder) == []


def test_a_description_says_where_copies_lie_and_what_they_take(store: LocalCopies, folder: Path) -> None:
    store.put(KEY, bytes(600_000))

    assert str(folder) in store.describe()
    assert "1 of 1 MB" in store.describe()


def test_forget_leaves_no_copy_on_this_host_and_upkeep_none_on_another(
    s3_server: SeaweedFS, database: Database, tmp_path: Path
) -> None:
    url = f"{s3_server.url}/{secrets.token_hex(8)}"
    here, there = tmp_path / "here", tmp_path / "there"
    stores = [
        open_store(s3_server.settings().model_copy(update={"store_url": url, "data_dir": data_dir}))
        for data_dir in (here, there)
    ]
    put_text(stores[0], "acme", DOC, "text")
    store_snapshot(database, stores[0], 1, 2)
    store_snapshot(database, stores[0], 3, document_id=OTHER_DOC)
    for number in (1, 2, 3):
        assert stores[1].get(chunk_object_key(chunk(number)[0].key)) == chunk(number)[1]
    kept = {f"{3:064x}.safetensors"}

    forget_document(database, stores[0], "acme", DOC, now=NOW)

    assert names(here / "copies") == kept
    assert len(names(there / "copies")) == 3
    assert prune_copies(database, stores[1]) == 2
    assert names(there / "copies") == kept
    for store in stores:
        store.close()


def test_verifying_reads_the_store_and_not_the_copies(
    database: Database, remote: Remote, store: LocalCopies, folder: Path
) -> None:
    snapshot_id = store_snapshot(database, store, 1)
    remote.put(chunk_object_key(chunk(1)[0].key), b"damaged")

    with database.reading() as session:
        row, digests = get_snapshot(session, snapshot_id), chunk_digests(session, snapshot_id)
    assert verify_snapshot(store, row, digests).problems


@pytest.mark.parametrize("left", [False, True])
def test_only_s3_has_copies_and_old_ones_are_looked_after(s3_server: SeaweedFS, tmp_path: Path, left: bool) -> None:
    settings = s3_server.settings().model_copy(update={"data_dir": tmp_path})
    if left:
        (tmp_path / "copies").mkdir()

    with closing(open_store(settings)) as copied, closing(open_store(StorageSettings(data_dir=tmp_path))) as plain:
        assert isinstance(copied, LocalCopies)
        assert not isinstance(plain, LocalCopies)
        assert without_copies(plain) is plain
    with closing(open_store(settings.model_copy(update={"local_copies_mb": 0}))) as none:
        assert isinstance(none, LocalCopies) is left
