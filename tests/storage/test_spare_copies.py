"""Texts and manifests on this host: only for while the store is away, and gone with what they are copies of."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage.database import Database
from storage.documents import put_text, text_key
from storage.errors import ObjectMissing, StoreUnavailable
from storage.objects import FolderStore, ObjectStore, SpareCopies
from storage.sweep import prune_copies
from tests.storage.made_rows import DOC, OTHER_DOC, submit

KEY = text_key("acme", DOC)


class Remote(FolderStore):
    is_away = False

    def get(self, key: str) -> bytes:
        if self.is_away:
            raise StoreUnavailable
        return super().get(key)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    with closing(Remote(tmp_path / "remote")) as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spare"


@pytest.fixture
def store(remote: Remote, folder: Path) -> SpareCopies:
    return SpareCopies(remote, folder, 10**6)


@pytest.mark.parametrize("by", ["put", "get"])
def test_what_went_through_here_is_there_while_the_store_is_away(remote: Remote, store: SpareCopies, by: str) -> None:
    through: ObjectStore = store if by == "put" else remote
    through.put(KEY, b"text")
    store.get(KEY)

    remote.is_away = True

    assert store.get(KEY) == b"text"
    with pytest.raises(StoreUnavailable):
        store.get(text_key("acme", OTHER_DOC))


def test_the_store_is_asked_first(remote: Remote, store: SpareCopies) -> None:
    store.put(KEY, b"old")
    remote.put(KEY, b"new")
    assert store.get(KEY) == b"new"

    remote.delete(KEY)
    with pytest.raises(ObjectMissing):
        store.get(KEY)

    remote.is_away = True
    with pytest.raises(StoreUnavailable):
        store.get(KEY)


def test_chunks_are_not_copied_and_nobody_else_may_read_texts(store: SpareCopies, folder: Path) -> None:
    store.put("chunks/a.safetensors", b"x")
    store.put(KEY, b"text")

    (copy,) = folder.iterdir()
    assert copy.stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0


def test_a_copy_that_was_doubted_is_gone(remote: Remote, store: SpareCopies) -> None:
    store.put(KEY, b"text")

    assert store.drop_copy(KEY)
    assert not store.drop_copy(KEY)

    remote.is_away = True
    with pytest.raises(StoreUnavailable):
        store.get(KEY)


def test_what_was_forgotten_elsewhere_or_is_over_the_budget_goes(
    database: Database, remote: Remote, store: SpareCopies, folder: Path
) -> None:
    submit(database)
    put_text(store, "acme", DOC, "known")
    put_text(store, "acme", OTHER_DOC, "not known")

    assert prune_copies(database, store) == 1
    assert [path.read_text() for path in folder.iterdir()] == ["known"]

    assert prune_copies(database, SpareCopies(remote, folder, 0)) == 0
    assert not list(folder.iterdir())


def test_without_a_budget_nothing_is_copied(remote: Remote, folder: Path) -> None:
    SpareCopies(remote, folder, 0).put(KEY, b"text")

    assert not folder.exists()


def test_a_disk_that_fails_costs_the_copy_alone(remote: Remote, store: SpareCopies, folder: Path) -> None:
    folder.write_text("not a folder")

    store.put(KEY, b"text")

    assert store.get(KEY) == b"text"
