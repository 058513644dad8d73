"""One contract for every object store, then what is special to each."""

import errno
import os
import pickle
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3.session
import botocore.auth
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ConnectionClosedError, ResponseStreamingError
from botocore.httpsession import URLLib3Session
from botocore.response import StreamingBody
from pydantic import SecretStr
from urllib3.connection import HTTPConnection

import storage.objects.s3
from pipeline.local_servers import SeaweedFS
from storage.errors import (
    BucketMissing,
    ClockSkew,
    ObjectMissing,
    ObjectStoreError,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
)
from storage.objects import FolderStore, LocalCopies, ObjectStore, open_store
from storage.settings import StorageSettings

MIB = 1024 * 1024


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


@pytest.fixture
def s3_settings(s3_server: SeaweedFS) -> StorageSettings:
    changes = {
        "store_url": f"{s3_server.url}/{secrets.token_hex(8)}",
        "patience_s": 0.0,
        "local_copies_mb": 0,
    }
    return s3_server.settings().model_copy(update=changes)


@pytest.fixture
def s3_store(s3_settings: StorageSettings) -> Iterator[ObjectStore]:
    with closing(open_store(s3_settings)) as store:
        yield store


@pytest.fixture
def copies_settings(s3_settings: StorageSettings) -> StorageSettings:
    return s3_settings.model_copy(update={"local_copies_mb": 100})


@pytest.fixture
def copies_store(copies_settings: StorageSettings) -> Iterator[ObjectStore]:
    with closing(open_store(copies_settings)) as store:
        yield store


@pytest.fixture(params=["folder", "s3", "copies"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(f"{request.param}_store")
    return found


@pytest.mark.parametrize("size_bytes", [0, 1, 8 * MIB, 8 * MIB + 1, 40_000_000])
def test_an_object_comes_back_as_it_was_put(store: ObjectStore, size_bytes: int) -> None:
    data = secrets.token_bytes(size_bytes)

    store.put("chunks/a.safetensors", data)

    assert store.get("chunks/a.safetensors") == data
    assert store.size("chunks/a.safetensors") == size_bytes


def test_a_memoryview_of_wider_items_is_stored_as_its_bytes(store: ObjectStore) -> None:
    view = memoryview(bytes(range(16))).cast("I")

    store.put("a", view)

    assert store.get("a") == bytes(range(16))


@pytest.mark.parametrize("key", ["a", "chunks/a"])
@pytest.mark.parametrize("start", [0, 1, 5 * MIB + 7])
def test_a_part_is_read_into_the_views_in_turn(store: ObjectStore, start: int, key: str) -> None:
    data = secrets.token_bytes(12 * MIB)
    store.put(key, data)
    parts = [bytearray(size) for size in (3, 0, 2 * MIB, *[1000] * 600)]

    size_bytes = store.read_into(key, start, [memoryview(part) for part in parts])

    found = b"".join(parts)
    assert size_bytes == len(data)
    assert found == data[start : start + len(found)]


@pytest.mark.parametrize("key", ["a", "chunks/a"])
def test_views_beyond_the_end_are_left_alone(store: ObjectStore, key: str) -> None:
    store.put(key, b"0123456789")
    parts = [bytearray(b"x" * 4), bytearray(b"x" * 4)]

    assert store.read_into(key, 5, [memoryview(part) for part in parts]) == 10
    assert parts == [b"5678", b"9xxx"]
    assert store.read_into(key, 10, [memoryview(bytearray(1))]) == 10
    assert store.read_into(key, 3, []) == 10


@pytest.mark.parametrize("key", ["a/b", "chunks/b"])
def test_putting_again_replaces(store: ObjectStore, key: str) -> None:
    store.put(key, b"long and old")

    store.put(key, b"new")

    assert store.get(key) == b"new"
    assert store.size(key) == 3
    assert [*store.keys()] == [key]


@pytest.mark.parametrize("key", ["missing", "folder", "folder/missing", "folder/object/below", "chunks/missing"])
def test_a_missing_object_is_told_by_its_key(store: ObjectStore, key: str) -> None:
    store.put("folder/object", b"here")

    for read in (store.get, store.size, lambda key: store.read_into(key, 0, [memoryview(bytearray(1))])):
        with pytest.raises(ObjectMissing) as caught:
            read(key)
        assert caught.value.key == key
        assert not caught.value.retryable


@pytest.mark.parametrize("folder", ["a", "chunks"])
def test_deleting_twice_is_deleting_once(store: ObjectStore, folder: str) -> None:
    store.put(f"{folder}/b", b"1")
    store.put(f"{folder}/c", b"2")

    store.delete(f"{folder}/b")
    store.delete(f"{folder}/b")

    assert [*store.keys()] == [f"{folder}/c"]
    with pytest.raises(ObjectMissing):
        store.get(f"{folder}/b")


def test_deleting_a_folder_of_objects_deletes_nothing(store: ObjectStore) -> None:
    store.put("a/b", b"1")

    store.delete("a")

    assert store.get("a/b") == b"1"


def test_keys_are_those_that_begin_with_the_prefix(store: ObjectStore) -> None:
    every = {"chunks/aa", "chunks/ab/1", "chunks-old/a", "manifests/t/d/f.json"}
    for key in every:
        store.put(key, b"")

    assert {*store.keys()} == every
    assert {*store.keys("chunks")} == every - {"manifests/t/d/f.json"}
    assert {*store.keys("chunks/")} == {"chunks/aa", "chunks/ab/1"}
    assert {*store.keys("chunks/a")} == {"chunks/aa", "chunks/ab/1"}
    assert {*store.keys("chunks/ab/")} == {"chunks/ab/1"}
    assert {*store.keys("nothing/")} == set()


def test_keys_are_listed_beyond_one_page(store: ObjectStore) -> None:
    keys = {f"many/{number:04}" for number in range(1005)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))

    assert sorted(store.keys("many/")) == sorted(keys)


def test_a_listing_tells_size_and_time_of_the_last_put(store: ObjectStore) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)  # a server may round to seconds
    store.put("chunks/a", b"four")
    store.put("chunks/b", b"")
    store.put("other", b"1")

    found = {entry.key: entry for entry in store.entries("chunks/")}

    assert {key: entry.size_bytes for key, entry in found.items()} == {"chunks/a": 4, "chunks/b": 0}
    for entry in found.values():
        assert before <= entry.modified_at <= datetime.now(UTC) + timedelta(seconds=2)


@pytest.mark.parametrize(
    "key",
    ["", "/", "/a", "a/", "a//b", "..", "a/../b", ".", "./a", ".hidden", "a/.b", "a b", "a\\b", "a\n", "a\0",
     "Vertrag-ü", "合同", "a?b", "a%2fb", "x" * 201, "/".join(["x" * 100] * 9)],
)  # fmt: skip
def test_what_is_not_a_key_is_refused(store: ObjectStore, key: str) -> None:
    for call in (store.get, store.size, store.delete):
        with pytest.raises(ValueError, match="not an object key"):
            call(key)
    with pytest.raises(ValueError, match="not an object key"):
        store.put(key, b"")


def test_a_prefix_that_no_key_has_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="not the beginning"):
        list(store.keys("../other"))


@pytest.mark.parametrize("size_bytes", [100_000, 20_000_000])
def test_racing_puts_leave_one_whole_object(store: ObjectStore, size_bytes: int) -> None:
    versions = [bytes([number]) * size_bytes for number in range(16)]
    start = threading.Barrier(16)

    def put(data: bytes) -> None:
        start.wait()
        store.put("raced", data)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, versions))

    assert store.get("raced") in versions
    assert [*store.keys()] == ["raced"]
    assert store.sweep(0) == 0


def test_a_reader_sees_whole_objects_while_they_are_replaced(store: ObjectStore) -> None:
    versions = [bytes([number]) * (9 * MIB) for number in range(2)]
    store.put("a", versions[0])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for data in versions:
                store.put("a", data)

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(replace)
        try:
            seen = [store.get("a") for _ in range(20)]
        finally:
            stop.set()
        writer.result()

    assert all(data in versions for data in seen)


def test_a_forked_child_can_use_the_store_of_its_parent(
    request: pytest.FixtureRequest, store: ObjectStore, tmp_path: Path
) -> None:
    script = """
import os
from storage.objects import open_store
from storage.settings import StorageSettings
store = open_store(StorageSettings())
store.put("chunks/a", b"x" * 20_000_000)
child = os.fork()
whole = store.get("chunks/a") == b"x" * 20_000_000
if child == 0:
    os._exit(0 if whole else 1)
assert whole and os.waitpid(child, 0)[1] == 0
store.close()
"""
    environment = {**os.environ, "PLATEMAKER_DATA_DIR": str(tmp_path)}
    if not isinstance(store, FolderStore):
        name = "copies_settings" if isinstance(store, LocalCopies) else "s3_settings"
        environment |= variables(request.getfixturevalue(name))

    done = subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=False)

    assert done.returncode == 0


def test_the_folder_is_the_default_store(tmp_path: Path) -> None:
    store = open_store(StorageSettings(data_dir=tmp_path))

    store.put("a/b", b"1")

    assert (tmp_path / "objects" / "a" / "b").read_bytes() == b"1"
    assert str(tmp_path / "objects") in store.describe()


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_folder_is_named_by_path_or_by_url(tmp_path: Path, form: str) -> None:
    store = open_store(StorageSettings(store_url=form.format(tmp_path / "elsewhere")))

    store.put("a", b"1")

    assert (tmp_path / "elsewhere" / "a").read_bytes() == b"1"


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_told_and_leaves_nothing_behind(
    folder_store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    folder_store.put("a", b"old")

    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, pytest.raises(StoreFull, match="PLATEMAKER_DATA_DIR"):
        patch.setattr(os, call, fail)
        folder_store.put("a", b"new")

    assert folder_store.get("a") == b"old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a"]


def test_short_writes_are_continued(folder_store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole_write(descriptor, data[:7]))

    folder_store.put("a", b"more than seven bytes")

    assert folder_store.get("a") == b"more than seven bytes"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_told(folder_store: FolderStore, tmp_path: Path) -> None:
    partial = tmp_path / "objects" / ".partial"
    partial.chmod(0o500)
    try:
        with pytest.raises(StoreDenied, match="PLATEMAKER_STORE_URL"):
            folder_store.put("a", b"1")
    finally:
        partial.chmod(0o700)


def test_a_write_that_is_refused_is_told(folder_store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "refused")

    with monkeypatch.context() as patch, pytest.raises(StoreDenied, match="PLATEMAKER_STORE_URL"):
        patch.setattr(os, "open", refuse)
        folder_store.put("a", b"1")


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ObjectStoreError, match="Something else"):
        FolderStore(tmp_path / "file" / "objects")


def test_an_object_cannot_lie_below_another(folder_store: FolderStore, tmp_path: Path) -> None:
    folder_store.put("a", b"1")
    folder_store.put("b/c", b"2")

    for key in ("a/below", "b"):
        with pytest.raises(ObjectStoreError, match="Something else"):
            folder_store.put(key, b"3")

    assert {*folder_store.keys()} == {"a", "b/c"}
    assert not [*(tmp_path / "objects" / ".partial").iterdir()]


def test_a_folder_that_is_gone_is_not_an_empty_store(folder_store: FolderStore, tmp_path: Path) -> None:
    folder_store.put("a", b"1")
    (tmp_path / "objects").rename(tmp_path / "unmounted")

    for call in (
        lambda: folder_store.get("a"),
        lambda: folder_store.size("a"),
        lambda: folder_store.put("a", b"2"),
        lambda: folder_store.delete("a"),
        lambda: list(folder_store.keys()),
    ):
        with pytest.raises(StoreUnavailable, match="mounted"):
            call()


def test_the_sweep_takes_what_a_killed_put_left(folder_store: FolderStore, tmp_path: Path) -> None:
    left = tmp_path / "objects" / ".partial" / "0123"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    fresh = left.with_name("4567")
    fresh.write_bytes(b"being written")

    assert [*folder_store.keys()] == []
    assert folder_store.sweep(3600) == 1
    assert fresh.exists()


def test_foreign_files_are_not_listed(folder_store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "objects" / "lost+found").mkdir()
    (tmp_path / "objects" / ".DS_Store").write_bytes(b"")
    (tmp_path / "objects" / "a b").write_bytes(b"")

    assert [*folder_store.keys()] == []


def test_wrong_keys_name_their_variables(s3_settings: StorageSettings) -> None:
    wrong_keys = [
        {"s3_secret_access_key": SecretStr("wrong-secret")},
        {"s3_access_key_id": SecretStr("wrong-id")},
    ]
    for wrong in wrong_keys:
        with closing(open_store(s3_settings.model_copy(update=wrong))) as store:
            for call in calls(store):
                with pytest.raises(StoreDenied, match="PLATEMAKER_S3_SECRET_ACCESS_KEY"):
                    call()


def test_a_wrong_bucket_names_its_variable(s3_settings: StorageSettings) -> None:
    elsewhere = s3_settings.model_copy(update={"store_url": "s3://no-such-bucket/prefix"})
    with closing(open_store(elsewhere)) as store:
        for call in calls(store):
            with pytest.raises(BucketMissing, match="PLATEMAKER_STORE_URL") as caught:
                call()
            assert caught.value.bucket == "no-such-bucket"


def test_a_wrong_clock_is_told(s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: now() - timedelta(hours=2))

    with pytest.raises(ClockSkew, match="clock"):
        s3_store.put("a", b"1")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", StoreUnavailable),
        (500, "InternalError", StoreUnavailable),
        (507, "InsufficientStorage", StoreFull),
        (403, "AccessDenied", StoreDenied),
        (400, "EntityTooLarge", ObjectStoreError),
    ],
)
def test_an_answer_is_translated_by_its_meaning(
    s3_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    expected: type[ObjectStoreError],
) -> None:
    def answer(_: URLLib3Session, request: AWSPreparedRequest) -> AWSResponse:
        response = AWSResponse(request.url, status, {}, None)
        response._content = f"<Error><Code>{code}</Code></Error>".encode()
        return response

    monkeypatch.setattr(URLLib3Session, "send", answer)

    with pytest.raises(ObjectStoreError) as caught:
        s3_store.put("a", b"1")

    assert type(caught.value) is expected
    assert caught.value.__cause__ is not None


def test_a_stopped_server_is_unavailable_until_it_is_back(s3_server: SeaweedFS, s3_store: ObjectStore) -> None:
    s3_store.put("a", b"1")
    s3_server.stop()
    try:
        with pytest.raises(StoreUnavailable, match="PLATEMAKER_S3_ENDPOINT_URL") as caught:
            s3_store.get("a")
    finally:
        s3_server.start()

    assert caught.value.retryable
    assert s3_store.get("a") == b"1"


def test_an_interrupted_upload_leaves_nothing_behind(
    s3_server: SeaweedFS, s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_store.put("a", b"old")
    send = URLLib3Session.send

    def cut_third_part(session: URLLib3Session, request: AWSPreparedRequest) -> AWSResponse:
        if "partNumber=3" in request.url:
            raise ConnectionClosedError(endpoint_url=request.url)
        return send(session, request)

    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(URLLib3Session, "send", cut_third_part)
        s3_store.put("a", bytes(40_000_000))

    assert s3_store.get("a") == b"old"
    with closing(plain_client(s3_server)) as client:
        assert "Uploads" not in client.list_multipart_uploads(Bucket=s3_server.bucket)


def test_the_sweep_aborts_uploads_of_killed_puts(
    s3_server: SeaweedFS, s3_settings: StorageSettings, s3_store: ObjectStore
) -> None:
    prefix = (s3_settings.store_url or "").rpartition("/")[2]
    with closing(plain_client(s3_server)) as client:
        client.create_multipart_upload(Bucket=s3_server.bucket, Key=f"{prefix}/left")
        client.create_multipart_upload(Bucket=s3_server.bucket, Key="of-somebody-else")

        assert s3_store.sweep(3600) == 0
        assert s3_store.sweep(0) == 1
        left = client.list_multipart_uploads(Bucket=s3_server.bucket)["Uploads"]
        assert [upload["Key"] for upload in left] == ["of-somebody-else"]
        client.abort_multipart_upload(Bucket=s3_server.bucket, Key="of-somebody-else", UploadId=left[0]["UploadId"])


def test_a_body_that_breaks_off_is_read_again(s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = secrets.token_bytes(40_000_000)
    s3_store.put("a", data)
    read_body = storage.objects.s3._read_body
    lock = threading.Lock()
    num_reads = 0

    def break_off(body: StreamingBody, into: Sequence[memoryview]) -> None:
        nonlocal num_reads
        with lock:
            num_reads += 1
            broken = num_reads % 3 == 0
        if broken:
            read_body(body, [view[: view.nbytes // 2] for view in into])
            raise ResponseStreamingError(error="cut")
        read_body(body, into)

    monkeypatch.setattr(storage.objects.s3, "_read_body", break_off)

    assert s3_store.get("a") == data
    assert num_reads > 5


def test_a_body_that_always_breaks_off_is_unavailable(s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_store.put("a", b"1")

    def break_off(body: StreamingBody, into: Sequence[memoryview]) -> None:
        raise ResponseStreamingError(error="cut")

    monkeypatch.setattr(storage.objects.s3, "_read_body", break_off)

    with pytest.raises(StoreUnavailable):
        s3_store.get("a")


def test_connections_are_used_again(s3_settings: StorageSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    connect = HTTPConnection.connect
    monkeypatch.setattr(HTTPConnection, "connect", lambda self: (opened.append(self.host), connect(self))[1])
    with closing(open_store(s3_settings)) as store:
        store.put("a", b"0123456789")
        for start in range(8):
            part = bytearray(2)
            store.read_into("a", start, [memoryview(part)])
            assert part == b"0123456789"[start : start + 2]

    assert len(opened) == 1


def test_errors_and_descriptions_hold_no_credentials(s3_settings: StorageSettings) -> None:
    secret = SecretStr("never-to-be-shown")
    settings = s3_settings.model_copy(update={"s3_secret_access_key": secret})
    with closing(open_store(settings)) as store:
        with pytest.raises(StoreDenied) as caught:
            store.get("a")
        shown = [str(caught.value), repr(caught.value), repr(caught.value.__cause__), store.describe()]

    shown += [repr(store), str(settings), repr(settings)]
    for text in shown:
        assert "never-to-be-shown" not in text
        assert settings.s3_access_key_id
        assert settings.s3_access_key_id.get_secret_value() not in text


def test_opening_a_folder_does_not_import_boto3(tmp_path: Path) -> None:
    script = (
        "import sys; from storage.objects import open_store; from storage.settings import StorageSettings; "
        "open_store(StorageSettings()); assert not {'boto3', 'botocore', 'torch'} & {*sys.modules}"
    )

    done = subprocess.run([sys.executable, "-c", script], check=False)

    assert done.returncode == 0


def test_errors_survive_a_worker_process() -> None:
    for error in (ObjectMissing("a/b"), BucketMissing("b"), StoreDenied()):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def calls(store: ObjectStore) -> list[Any]:
    return [
        lambda: store.put("a", b"1"),
        lambda: store.put("a", bytes(9 * MIB)),
        lambda: store.get("a"),
        lambda: store.size("a"),
        lambda: list(store.keys()),
    ]


def variables(settings: StorageSettings) -> dict[str, str]:
    assert settings.store_url
    assert settings.s3_endpoint_url
    assert settings.s3_access_key_id
    assert settings.s3_secret_access_key
    return {
        "PLATEMAKER_STORE_URL": settings.store_url,
        "PLATEMAKER_LOCAL_COPIES_MB": str(settings.local_copies_mb),
        "PLATEMAKER_S3_ENDPOINT_URL": settings.s3_endpoint_url,
        "PLATEMAKER_S3_ACCESS_KEY_ID": settings.s3_access_key_id.get_secret_value(),
        "PLATEMAKER_S3_SECRET_ACCESS_KEY": settings.s3_secret_access_key.get_secret_value(),
    }


def plain_client(server: SeaweedFS) -> Any:
    return boto3.session.Session().client(
        "s3",
        region_name="us-east-1",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
    )
