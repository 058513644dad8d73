import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.objects.base import ObjectStore, StoredObject, check_key
from storage.objects.folder import FolderStore
from storage.objects.patient import PatientStore
from storage.objects.probe import check_store
from storage.settings import StorageSettings

__all__ = ["FolderStore", "ObjectStore", "PatientStore", "StoredObject", "check_key", "check_store", "open_store"]


def open_store(settings: StorageSettings, *, stopping: threading.Event | None = None) -> ObjectStore:
    """The store that PLATEMAKER_STORE_URL names. A folder is made if it does not exist; a bucket is not.

    Once `stopping` is set, a store that does not answer is not waited for.
    """
    return PatientStore(_open(settings), settings.patience_s, stopping=stopping)


def _open(settings: StorageSettings) -> ObjectStore:
    url = settings.resolved_store_url()
    if url.startswith("s3://"):
        # Here and not above: boto3 takes as long to import as the rest of storage together.
        from storage.objects.s3 import S3Store

        return S3Store(settings)
    return FolderStore(Path(unquote(urlsplit(url).path) if url.startswith("file://") else url))
