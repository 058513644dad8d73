from contextlib import closing
from pathlib import Path

import pytest

from storage.errors import ObjectMissing
from storage.objects import FolderStore, LocalCopies
from storage.objects.measured import MeasuredStore


class Notes:
    def __init__(self) -> None:
        self.told: list[tuple[str, str, int]] = []

    def __call__(self, tier: str, operation: str, size_bytes: int, seconds: float) -> None:
        assert seconds >= 0
        self.told.append((tier, operation, size_bytes))


def test_bytes_are_told_by_the_tier_that_moved_them(tmp_path: Path) -> None:
    notes = Notes()
    inner = MeasuredStore(FolderStore(tmp_path / "store"), 0, tier="s3", note=notes)
    with closing(LocalCopies(inner, tmp_path / "copies", 10**6, note=notes)) as store:
        store.put("chunks/a", b"0123456789")
        store.put("texts/b", b"text")
        store.get("chunks/a")
        store.read_into("chunks/a", 7, [memoryview(bytearray(8))])
        store.get("texts/b")
        store.drop_copy("chunks/a")
        store.read_into("chunks/a", 7, [memoryview(bytearray(8))])

    assert notes.told == [
        ("s3", "put", 10),
        ("s3", "put", 4),
        ("copies", "get", 10),
        ("copies", "get", 3),
        ("s3", "get", 4),
        ("s3", "get", 3),
    ]


def test_what_fails_is_not_counted(tmp_path: Path) -> None:
    notes = Notes()
    store = MeasuredStore(FolderStore(tmp_path), 0, tier="folder", note=notes)
    with closing(store), pytest.raises(ObjectMissing):
        store.get("texts/b")

    assert notes.told == []
