import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

# A leading dot is kept for the stores' own files. 200 and 800 leave room below the limits of file names (255)
# and of S3 keys (1024) for temporary names and a bucket prefix.
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_MAX_KEY_LENGTH = 800


def is_key(text: str) -> bool:
    return len(text) <= _MAX_KEY_LENGTH and all(_SEGMENT.fullmatch(part) for part in text.split("/"))


def check_key(key: str) -> str:
    """Return the key. Raises: ValueError unless it is 'part/part/…' of letters, digits, '.', '_' and '-'."""
    if not is_key(key):
        raise ValueError(f"not an object key: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix: how a key can begin, or nothing. Raises: ValueError."""
    if prefix and not is_key(prefix.removesuffix("/")):
        raise ValueError(f"not the beginning of an object key: {prefix!r}")
    return prefix


class StoredObject(NamedTuple):
    """An object as a listing shows it. `modified_at` is aware UTC, by the store's own clock."""

    key: str
    size_bytes: int
    modified_at: datetime


class ObjectStore(Protocol):
    """Whole objects under names. Safe to use from several threads, and in a child after a fork.

    No key may be a folder of another (`a` and `a/b`): file systems cannot hold both.
    Every method raises ObjectStoreError, and ValueError for what is not a key.
    """

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store the object, replacing what was there. Readers see the old or the new one, never a part."""

    def get(self, key: str) -> bytes:
        """Raises: ObjectMissing."""

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        """Fill the writable views, one after the other, with the object's bytes from `start` on.

        Returns the size of the whole object; where it ends before the views do, the rest of them is left alone.
        Raises: ObjectMissing.
        """

    def has_copy(self, key: str) -> bool:
        """Whether the object would be read from a nearer copy now."""

    def drop_copy(self, key: str) -> bool:
        """Let go of a nearer copy of the object. True: there was one, so reading again may give other bytes."""

    def size(self, key: str) -> int:
        """Size in bytes. Raises: ObjectMissing."""

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Keys that begin with this text, in no promised order."""

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        """The same objects as `keys`, with size and time of the last put."""

    def sweep(self, older_than_s: float) -> int:
        """Remove what interrupted puts left behind this many seconds ago or earlier; returns how many."""

    def describe(self) -> str:
        """Where the objects lie, for a person. Holds no credentials."""

    def close(self) -> None:
        """Let go of connections; the store is not used afterwards."""


class Bucket(Protocol):
    """A bucket that others fill: objects under any names, only read. Every method raises ObjectStoreError."""

    def listing(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Key and size in bytes of each object whose key begins so."""

    def get(self, key: str) -> bytes:
        """Raises: ObjectMissing."""

    def close(self) -> None:
        """Let go of connections; the bucket is not used afterwards."""
