import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.breaker import Breaker
from storage.objects.base import Bucket, ObjectStore, StoredObject, check_key
from storage.objects.folder import FolderStore
from storage.objects.guarded import GuardedStore
from storage.objects.local_copies import LocalCopies
from storage.objects.measured import MeasuredStore, NoteTransfer, note_nothing
from storage.objects.patient import PatientStore
from storage.objects.probe import check_store
from storage.objects.spare_copies import SpareCopies
from storage.settings import StorageSettings

__all__ = [
    "Bucket",
    "FolderStore",
    "GuardedStore",
    "LocalCopies",
    "NoteTransfer",
    "ObjectStore",
    "PatientStore",
    "SpareCopies",
    "StoredObject",
    "check_key",
    "check_store",
    "copies_of",
    "open_bucket",
    "open_store",
    "scratch_store",
    "without_copies",
]


def open_store(
    settings: StorageSettings,
    *,
    stopping: threading.Event | None = None,
    note: NoteTransfer = note_nothing,
    breaker: Breaker | None = None,
) -> ObjectStore:
    """The store that PLATEMAKER_STORE_URL names. A folder is made if it does not exist; a bucket is not.

    Once `stopping` is set, a store that does not answer is not waited for. `note` is told of every put and get. With a
    `breaker`, a store that keeps failing is not asked for a while.
    """
    url = settings.resolved_store_url()
    if url.startswith("s3://"):
        # Here and not above: boto3 takes as long to import as the rest of storage together.
        from storage.objects.s3 import S3Store

        store = MeasuredStore(S3Store(settings), settings.patience_s, tier="s3", note=note, stopping=stopping)
        return _with_copies(_guarded(store, breaker), settings, note)
    store = MeasuredStore(
        FolderStore(_folder_of(url)), settings.patience_s, tier="folder", note=note, stopping=stopping
    )
    return _guarded(store, breaker)


@contextmanager
def scratch_store(settings: StorageSettings) -> Iterator[StorageSettings]:
    """Settings of an empty store inside the one that is configured, where nothing of that is seen. Emptied at the end;
    of a process that is killed, `scratch-…` stays."""
    url = f"{settings.resolved_store_url().rstrip('/')}/scratch-{secrets.token_hex(8)}"
    scratch = settings.model_copy(update={"store_url": url})
    try:
        yield scratch
    finally:
        if url.startswith("s3://"):
            store = without_copies(open_store(scratch))
            for key in list(store.keys()):
                store.delete(key)
        else:
            shutil.rmtree(_folder_of(url), ignore_errors=True)


def _folder_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path) if url.startswith("file://") else url)


def open_bucket(settings: StorageSettings, name: str) -> Bucket:
    """Any bucket, to read files from, with the server and the keys of the settings."""
    from storage.objects.bucket import S3Bucket

    return S3Bucket(settings, name)


def without_copies(store: ObjectStore) -> ObjectStore:
    """The store itself, for who wants to know what lies there."""
    while isinstance(store, LocalCopies | SpareCopies):
        store = store.inner
    return store


def copies_of(store: ObjectStore) -> Iterator[LocalCopies | SpareCopies]:
    """What keeps copies of the store on this host."""
    while isinstance(store, LocalCopies | SpareCopies):
        yield store
        store = store.inner


def _guarded(store: ObjectStore, breaker: Breaker | None) -> ObjectStore:
    return store if breaker is None else GuardedStore(store, breaker)


def _with_copies(store: ObjectStore, settings: StorageSettings, note: NoteTransfer) -> ObjectStore:
    texts = settings.data_dir / "spare"
    if settings.local_texts_mb or texts.exists():
        store = SpareCopies(store, texts, settings.local_texts_mb * 10**6)
    folder = settings.data_dir / "copies"
    if not settings.local_copies_mb and not folder.exists():
        return store
    # Also where copies are no longer wanted: the old ones are still to be deleted.
    return LocalCopies(store, folder, settings.local_copies_mb * 10**6, note=note)
