import http.client
import io
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import boto3.session
from botocore import exceptions as boto
from botocore.config import Config
from botocore.response import StreamingBody

from storage.errors import (
    BucketMissing,
    ClockSkew,
    ObjectMissing,
    ObjectStoreError,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    StoreUnusable,
    WrongRegion,
)
from storage.objects.base import StoredObject, check_key, check_prefix, is_key
from storage.settings import StorageSettings

# Larger objects travel in parts of this size, several at a time. S3 wants at least 5 MiB.
PART_BYTES = 8 * 1024 * 1024
PUTS_AT_ONCE = 4
_READ_ATTEMPTS = 4
_BROKEN_BODY = (boto.IncompleteReadError, boto.ReadTimeoutError, boto.ResponseStreamingError)
_DENIED = {
    "AccessDenied",
    "AllAccessDisabled",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
_ELSEWHERE = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "301",
    "307",
    "308",
}
_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
# NoSuchUpload: a sweep, or the retry of a completion whose answer was lost. Putting again is right for both.
_TRANSIENT = {"NoSuchUpload", "RequestTimeout", "SlowDown", "Throttling", "TooManyRequests"}

_T = TypeVar("_T")


class _Connection(NamedTuple):
    client: Any
    pool: ThreadPoolExecutor


class _Part(NamedTuple):
    start: int
    body: StreamingBody
    version: str
    object_bytes: int


class _ReplacedError(Exception):
    """The object was replaced between two reads of its parts."""


class S3Store:
    """Objects in a bucket of any S3-compatible server."""

    def __init__(self, settings: StorageSettings) -> None:
        url = urlsplit(settings.resolved_store_url())
        folder = url.path.strip("/")
        self._settings = settings
        self._bucket = url.netloc
        self._prefix = f"{check_key(folder)}/" if folder else ""
        self._connections: dict[int, _Connection] = {}
        self._locks: dict[int, threading.Lock] = {}

    def put(self, key: str, data: bytes | memoryview) -> None:
        where = self._where(key)
        view = memoryview(data).cast("B")
        with self._translated(key):
            if len(view) > PART_BYTES:
                self._put_parts(where, view)
            else:
                self._connection().client.put_object(**where, Body=bytes(view))

    def get(self, key: str) -> bytes:
        where = self._where(key)
        with self._translated(key):
            for _ in range(_READ_ATTEMPTS):
                with suppress(_ReplacedError):
                    return self._get_parts(where)
        raise StoreUnavailable(f"Object {key} was replaced again and again while it was read.")

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        where = self._where(key)
        views = [view.cast("B") for view in into]
        size = sum(view.nbytes for view in views)
        with self._translated(key):
            for _ in range(_READ_ATTEMPTS):
                first = self._open_part(where, start, start + size) if size else None
                if first is None:
                    return self.size(key)
                with suppress(_ReplacedError):
                    self._read_part(where, first, start, _cut(views, first.object_bytes - start))
                    return first.object_bytes
        raise StoreUnavailable(f"Object {key} was replaced again and again while it was read.")

    def has_copy(self, key: str) -> bool:
        return False

    def drop_copy(self, key: str) -> bool:
        return False

    def size(self, key: str) -> int:
        where = self._where(key)
        with self._translated(key):
            # Not HEAD: its errors have no body, so a missing object looks like a missing bucket.
            part = self._open_part(where, 0, 1)
            if part is None:
                return 0
            with closing(part.body) as body:
                body.read()
            return part.object_bytes

    def delete(self, key: str) -> None:
        where = self._where(key)
        with self._translated():
            self._connection().client.delete_object(**where)

    def keys(self, prefix: str = "") -> Iterator[str]:
        for found in self.entries(prefix):
            yield found.key

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        begin = self._prefix + check_prefix(prefix)
        with self._translated():
            pages = self._connection().client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=begin):
                for found in page.get("Contents", ()):
                    key = found["Key"].removeprefix(self._prefix)
                    if is_key(key):
                        yield StoredObject(key, found["Size"], found["LastModified"].astimezone(UTC))

    def sweep(self, older_than_s: float) -> int:
        before = datetime.now(UTC) - timedelta(seconds=older_than_s)
        num_swept = 0
        with self._translated():
            client = self._connection().client
            pages = client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"] <= before:
                        client.abort_multipart_upload(
                            Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        num_swept += 1
        return num_swept

    def describe(self) -> str:
        server = self._settings.s3_endpoint_url or self._settings.s3_region
        return f"s3://{self._bucket}/{self._prefix} at {server}"

    def close(self) -> None:
        connection = self._connections.pop(os.getpid(), None)
        if connection:
            connection.pool.shutdown()
            connection.client.close()

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _connection(self) -> _Connection:
        """This process's own: sockets and threads do not survive a fork."""
        pid = os.getpid()
        found = self._connections.get(pid)
        if found is None:
            # One lock for each process too: the parent's could have been held at the moment of the fork.
            with self._locks.setdefault(pid, threading.Lock()):
                found = self._connections.get(pid) or self._connect()
                self._connections[pid] = found
        return found

    def _connect(self) -> _Connection:
        settings = self._settings
        key_id, secret = settings.s3_access_key_id, settings.s3_secret_access_key
        client = boto3.session.Session().client(
            "s3",
            region_name=settings.s3_region,
            endpoint_url=settings.s3_endpoint_url,
            aws_access_key_id=key_id and key_id.get_secret_value(),
            aws_secret_access_key=secret and secret.get_secret_value(),
            verify=str(settings.tls_ca_file) if settings.tls_ca_file else None,
            config=Config(
                connect_timeout=5,
                read_timeout=60,
                retries={"mode": "standard", "total_max_attempts": 3},
                max_pool_connections=settings.s3_max_connections,
                # Servers other than Amazon's answer the newer checksums with what looks like wrong keys, and
                # have no host name for each bucket. Our own digests carry integrity.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if settings.s3_endpoint_url else "auto"},
            ),
        )
        # Half for parts, half for the callers' own requests.
        return _Connection(client, ThreadPoolExecutor(max(1, settings.s3_max_connections // 2), "s3"))

    def _put_parts(self, where: dict[str, str], data: memoryview) -> None:
        client, pool = self._connection()
        upload = where | {"UploadId": client.create_multipart_upload(**where)["UploadId"]}

        copying = threading.Semaphore(PUTS_AT_ONCE)  # boto3 takes no view, so each part is copied

        def put_part(start: int) -> dict[str, Any]:
            number = start // PART_BYTES + 1
            with copying:
                body = bytes(data[start : start + PART_BYTES])
                answer = client.upload_part(**upload, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        is_complete = False
        try:
            parts = _run_all(pool, put_part, range(0, len(data), PART_BYTES))
            client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
            is_complete = True
        finally:
            if not is_complete:
                # The first error is the one to tell; what stays behind because of a second is for the sweep.
                with suppress(boto.BotoCoreError, boto.ClientError):
                    client.abort_multipart_upload(**upload)

    def _get_parts(self, where: dict[str, str]) -> bytes:
        first = self._open_part(where, 0, PART_BYTES)
        if first is None:
            return b""
        # BytesIO hands its memory out as bytes without a copy.
        buffer = io.BytesIO(bytes(first.object_bytes))
        with closing(first.body), buffer.getbuffer() as memory:

            def read_part(start: int) -> None:
                with memory[start : start + PART_BYTES] as into:
                    self._read_part(where, first, start, [into])

            if len(memory) > PART_BYTES:
                _run_all(self._connection().pool, read_part, range(0, len(memory), PART_BYTES))
            else:
                read_part(0)
        return buffer.getvalue()

    def _read_part(self, where: dict[str, str], first: _Part, start: int, into: Sequence[memoryview]) -> None:
        """Fill the views with the bytes from `start` on, of an object of which some part has been asked for. boto3
        retries requests but not bodies."""
        stop = start + sum(view.nbytes for view in into)
        part = first if first.start == start else None
        for attempts_left in reversed(range(_READ_ATTEMPTS)):
            part = part or self._open_part(where, start, stop)
            if part is None:
                raise _ReplacedError
            try:
                with closing(part.body) as body:
                    if part.version != first.version:
                        raise _ReplacedError
                    _read_body(body, into)
                return
            except _BROKEN_BODY:
                if not attempts_left:
                    raise
            part = None
            time.sleep(random.uniform(0.1, 0.5))

    def _open_part(self, where: dict[str, str], start: int, stop: int) -> _Part | None:
        """The bytes from start up to stop of an object; None where there are none."""
        try:
            answer = self._connection().client.get_object(**where, Range=f"bytes={start}-{stop - 1}")
        except boto.ClientError as exc:
            if exc.response["Error"]["Code"] in {"InvalidRange", "416"}:
                return None
            raise
        return _Part(start, answer["Body"], answer["ETag"], int(answer["ContentRange"].rpartition("/")[2]))

    @contextmanager
    def _translated(self, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except boto.ClientError as exc:
            raise self._meaning(exc, key) from exc
        except RecursionError as exc:  # boto3 asks for the bucket's region, is redirected, and asks for the region
            raise WrongRegion(self._settings.s3_region, expected=None) from exc
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError) as exc:
            raise StoreDenied from exc
        except (boto.ConnectionError, boto.HTTPClientError, *_BROKEN_BODY) as exc:
            if isinstance(getattr(exc, "kwargs", {}).get("error"), RecursionError):  # the same, met within a request
                raise WrongRegion(self._settings.s3_region, expected=None) from exc
            if "CERTIFICATE_VERIFY_FAILED" in str(exc):
                raise StoreUnusable(
                    "The certificate of the object store cannot be trusted. "
                    "Set PLATEMAKER_TLS_CA_FILE to its authority's."
                ) from exc
            raise StoreUnavailable(
                f"The object store {self.describe()} does not answer. "
                "Check that it runs and that PLATEMAKER_S3_ENDPOINT_URL is right."
            ) from exc
        except boto.BotoCoreError as exc:
            raise ObjectStoreError(f"The object store cannot be used: {type(exc).__name__}.") from exc

    def _meaning(self, exc: boto.ClientError, key: str | None) -> ObjectStoreError:
        code = exc.response["Error"]["Code"]
        status = exc.response["ResponseMetadata"]["HTTPStatusCode"]
        if code == "NoSuchBucket":
            return BucketMissing(self._bucket)
        if code == "NoSuchKey" and key:
            return ObjectMissing(key)
        if code in {"RequestTimeTooSkewed", "RequestExpired"}:
            return ClockSkew()
        if code in _FULL or status == 507:
            return StoreFull()
        expected = _expected_region(exc)
        if code in _ELSEWHERE and (expected or code != "AuthorizationHeaderMalformed"):
            return WrongRegion(self._settings.s3_region, expected=expected)
        if code in _DENIED or status in (401, 403):
            return StoreDenied()
        if code in _TRANSIENT or status >= 500:
            return StoreUnavailable(
                f"The object store {self.describe()} answered {code} ({status}). "
                "Look at its log and try again later, or raise PLATEMAKER_PATIENCE_S."
            )
        return ObjectStoreError(f"The object store answered {code} ({status}).")


def _expected_region(exc: boto.ClientError) -> str | None:
    """Amazon says it in a header or an element of its own, some other servers only in words."""
    error, headers = exc.response["Error"], exc.response["ResponseMetadata"].get("HTTPHeaders", {})
    said = re.search(r"expect(?:ing|ed) '?([a-z0-9-]+)", error.get("Message") or "")
    found = error.get("Region") or headers.get("x-amz-bucket-region") or (said and said[1])
    return str(found) if found else None


def _run_all(pool: ThreadPoolExecutor, work: Callable[[int], _T], starts: Iterable[int]) -> list[_T]:
    """Results in order. When one fails, the others have ended before its error is raised."""
    futures = [pool.submit(work, start) for start in starts]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def _cut(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The views of the first so many bytes."""
    kept = []
    for view in views:
        kept.append(view[:num_bytes])
        num_bytes -= kept[-1].nbytes
    return kept


def _read_body(body: StreamingBody, into: Sequence[memoryview]) -> None:
    """Fills the views. Past urllib3, whose `readinto` reads into memory of its own and copies; its response then does
    not notice that the connection is free again, so it is told."""
    response: Any = getattr(body, "_raw_stream", None)
    source: Any = getattr(response, "_fp", None)
    is_plain = isinstance(source, http.client.HTTPResponse) and not source.chunked
    readinto = source.readinto if is_plain else body.readinto
    try:
        for view in into:
            rest = view
            while rest.nbytes:
                count = readinto(rest)
                if not count:
                    raise boto.IncompleteReadError(actual_bytes=view.nbytes - rest.nbytes, expected_bytes=view.nbytes)
                rest = rest[count:]
        if is_plain and source.read(1) == b"":
            response.release_conn()
    except (OSError, http.client.HTTPException) as exc:
        raise boto.ResponseStreamingError(error=exc) from exc
