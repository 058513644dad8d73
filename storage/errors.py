"""What can go wrong with what lasts.

StorageError
├── ObjectStoreError          of one object, but for the family below
│   ├── ObjectMissing         no object under this key
│   └── StoreUnusable         the whole store, whatever the object
│       ├── StoreUnavailable  retryable: refused, timed out, 5xx
│       ├── StoreDenied       wrong keys or no permission
│       ├── BucketMissing     the bucket in PLATEMAKER_STORE_URL does not exist
│       ├── WrongRegion       the bucket lies in another region
│       ├── StoreFull         disk full, quota reached, mounted read-only
│       └── ClockSkew         this machine's clock is off
├── SnapshotError
│   ├── SnapshotMissing       never made, expired or erased
│   ├── SnapshotInUse         somebody reads it, or open questions need it
│   ├── SnapshotCorrupt       what was loaded is not what was stored
│   └── ArchiveRefused        a file that `snapshots import` does not take
├── JobMissing                no such job of this tenant
├── KeyTaken                  a client's key stands for a job with other content
├── QueueFull             a job would go beyond the bound on what is queued
├── RetryRefused              a cancelled job is not tried again
├── ScheduleMissing           no such schedule of this tenant
├── ScheduleTaken             there is a schedule of this name
├── DocumentUnknown           no such document of this tenant
├── SchemaError               database schema missing or old
├── SettingsError             the settings file cannot be used
└── DatabaseUnavailable       retryable: the database does not answer
    └── DatabaseRefused       wrong login, no such database, no permission, disk full

OUTAGES are those that are nobody's fault who waits for work: it is given back, and not counted as an attempt.
A class's docstring is its default message. Messages are safe to show: they hold keys, names and numbers,
never credentials or document text.
"""

import inspect
from typing import Any, ClassVar


class StorageError(Exception):
    """The storage failed."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or " ".join((inspect.getdoc(type(self)) or "").split()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Celery's pools pickle errors; the default would call __init__ with the finished message.
        return _restore, (type(self), self.args, vars(self))


def _restore(kind: type[StorageError], args: tuple[Any, ...], attributes: dict[str, Any]) -> StorageError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class ObjectStoreError(StorageError):
    """The object store refused the request."""


class ObjectMissing(ObjectStoreError):
    """The object store has no such object."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"The object store has no object {key}.")


class StoreUnusable(ObjectStoreError):
    """The object store cannot be used."""


class StoreUnavailable(StoreUnusable):
    """The object store does not answer. Check that it runs and that PLATEMAKER_S3_ENDPOINT_URL is right."""

    retryable = True


class StoreDenied(StoreUnusable):
    """The object store refused these credentials.

    Check PLATEMAKER_S3_ACCESS_KEY_ID and PLATEMAKER_S3_SECRET_ACCESS_KEY and what they may do.
    """


class BucketMissing(StoreUnusable):
    """The bucket does not exist."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        super().__init__(f"There is no bucket {bucket}. Create it, or correct PLATEMAKER_STORE_URL.")


class StoreFull(StoreUnusable):
    """The object store is full or read-only. Free space, or set PLATEMAKER_STORE_URL to another one."""


class WrongRegion(StoreUnusable):
    """The bucket lies in another region."""

    def __init__(self, region: str, *, expected: str | None) -> None:
        self.region = region
        self.expected = expected
        if expected:
            super().__init__(f"The bucket lies in {expected}, not in {region}. Set PLATEMAKER_S3_REGION to {expected}.")
        else:
            super().__init__(
                "The object store sends requests to another region or address. "
                "Correct PLATEMAKER_S3_REGION or PLATEMAKER_S3_ENDPOINT_URL."
            )


class ClockSkew(StoreUnusable):
    """The object store refused this machine's clock. Set the clock right (NTP) and try again."""


class SnapshotError(StorageError):
    """The snapshot cannot be used."""


class SnapshotMissing(SnapshotError):
    """There is no such snapshot."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"There is no snapshot {key}: never made, expired or erased.")


class SnapshotCorrupt(SnapshotError):
    """What was loaded is not what was stored."""

    def __init__(self, key: str, *, expected: str, actual: str) -> None:
        self.key = key
        self.expected = expected
        self.actual = actual
        super().__init__(f"Snapshot {key} is damaged: expected {expected}, found {actual}.")


class SnapshotInUse(SnapshotError):
    """The snapshot is in use. Wait until its questions are answered, or cancel their jobs."""

    def __init__(self, snapshot_id: int) -> None:
        self.snapshot_id = snapshot_id
        super().__init__(
            f"Snapshot {snapshot_id} is in use. Wait until its document's questions are answered, or cancel their jobs."
        )


class ArchiveRefused(SnapshotError):
    """The file is not a snapshot that can be imported."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"{name} was not imported: {reason}.")


class JobMissing(StorageError):
    """There is no such job."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(f"There is no job {job_id}. `platemaker jobs` lists yours.")


class KeyTaken(StorageError):
    """The key stands for another job."""

    def __init__(self, client_key: str, job_id: str) -> None:
        self.client_key = client_key
        self.job_id = job_id
        super().__init__(
            f"The key {client_key} stands for job {job_id}, which has other files or questions. Give another --key."
        )


class QueueFull(StorageError):
    """Too much is queued already."""

    def __init__(self, queued: int, added: int, most: int, tenant: str | None) -> None:
        self.queued = queued
        self.added = added
        self.most = most
        self.tenant = tenant
        whose, setting = ("are", "PLATEMAKER_MAX_QUEUED_ITEMS")
        if tenant is not None:
            whose, setting = (f"of tenant {tenant} are", "PLATEMAKER_TENANT_LIMITS")
        super().__init__(
            f"{queued:,} items {whose} not answered yet, and {added:,} more would go beyond the bound of {most:,}: "
            f"nothing was submitted. Try again when fewer wait (`platemaker jobs`), or raise {setting}."
        )


class RetryRefused(StorageError):
    """The job was cancelled."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(f"Job {job_id} was cancelled and is not tried again. Submit its files anew.")


class ScheduleMissing(StorageError):
    """There is no such schedule."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"There is no schedule {name}. `platemaker nightly list` lists yours.")


class ScheduleTaken(StorageError):
    """There is a schedule of this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"There is a schedule {name} already. Give another name, or remove that one first.")


class DocumentUnknown(StorageError):
    """There is no such document."""

    def __init__(self, document_id: str) -> None:
        self.document_id = document_id
        super().__init__(f"There is no document {document_id}.")


class SchemaError(StorageError):
    """The database schema is missing or older than this version. Run `platemaker db upgrade`."""


class DatabaseUnavailable(StorageError):
    """The database does not answer. Check that it runs and that PLATEMAKER_DATABASE_URL is right."""

    retryable = True


class DatabaseRefused(DatabaseUnavailable):
    """The database refused the login, or there is none of this name. Correct PLATEMAKER_DATABASE_URL."""

    retryable = False


class SettingsError(StorageError, ValueError):
    """The settings file cannot be used."""


OUTAGES = (StoreUnusable, DatabaseUnavailable, SchemaError)
