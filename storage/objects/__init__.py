import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.objects.base import Bucket, ObjectStore, StoredObject, check_key
from storage.objects.folder import FolderStore
from storage.objects.local_copies import LocalCopies
from storage.objects.measured import MeasuredStore, NoteTransfer, note_nothing
from storage.objects.patient import PatientStore
from storage.objects.probe import check_store
from storage.settings import StorageSettings

__all__ = [
    "Bucket",
    "FolderStore",
    "LocalCopies",
    "NoteTransfer",
    "ObjectStore",
    "PatientStore",
    "StoredObject",
    "check_key",
    "check_store",
    "open_bucket",
    "open_store",
    "without_copies",
]


def open_store(
    settings: StorageSettings, *, stopping: threading.Event | None = None, note: NoteTransfer = note_nothing
) -> ObjectStore:
    """The store that PLATEMAKER_STORE_URL names. A folder is made if it does not exist; a bucket is not.

    Once `stopping` is set, a store that does not answer is not waited for. `note` is told of every put and get.
    """
    url = settings.resolved_store_url()
    if url.startswith("s3://"):
        # Here and not above: boto3 takes as long to import as the rest of storage together.
        from storage.objects.s3 import S3Store

        store = MeasuredStore(S3Store(settings), settings.patience_s, tier="s3", note=note, stopping=stopping)
        return _with_copies(store, settings, note)
    folder = FolderStore(Path(unquote(urlsplit(url).path) if url.startswith("file://") else url))
    return MeasuredStore(folder, settings.patience_s, tier="folder", note=note, stopping=stopping)


def open_bucket(settings: StorageSettings, name: str) -> Bucket:
    """Any bucket, to read files from, with the server and the keys of the settings."""
    from storage.objects.bucket import S3Bucket

    return S3Bucket(settings, name)


def without_copies(store: ObjectStore) -> ObjectStore:
    """The store itself, for who wants to know what lies there."""
    return store.inner if isinstance(store, LocalCopies) else store


def _with_copies(store: ObjectStore, settings: StorageSettings, note: NoteTransfer) -> ObjectStore:
    folder = settings.data_dir / "copies"
    if not settings.local_copies_mb and not folder.exists():
        return store
    # Also where copies are no longer wanted: the old ones are still to be deleted.
    return LocalCopies(store, folder, settings.local_copies_mb * 10**6, note=note)
