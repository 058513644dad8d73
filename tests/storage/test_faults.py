"""A store that fails for a while goes unnoticed; one that needs a person says so at once; nothing is half stored."""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.local_servers import SeaweedFS
from storage import patience
from storage.errors import (
    ObjectMissing,
    ObjectStoreError,
    StorageError,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    StoreUnusable,
    WrongRegion,
)
from storage.objects import FolderStore, ObjectStore, PatientStore, StoredObject, check_store, open_store
from storage.patience import Patience
from storage.settings import StorageSettings
from tests.storage.faulty import Fault, Faulty, faulty

LONG_S = 60.0  # longer than any test waits


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.01)


@pytest.fixture(autouse=True)
def quick_boto(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3's own pauses between its three tries last a second or two."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)


@pytest.fixture
def proxy(s3_server: SeaweedFS) -> Iterator[Faulty]:
    with faulty(s3_server.endpoint_url) as told:
        yield told


@pytest.fixture
def settings(s3_server: SeaweedFS, proxy: Faulty) -> StorageSettings:
    through = {"store_url": f"{s3_server.url}/{secrets.token_hex(8)}", "s3_endpoint_url": proxy.endpoint_url}
    return s3_server.settings().model_copy(update={**through, "patience_s": LONG_S})


@pytest.fixture
def store(settings: StorageSettings) -> Iterator[ObjectStore]:
    with closing(open_store(settings)) as store:
        yield store


STORMS = {
    "500": Fault(status=500),
    "503": Fault(status=503, code="SlowDown"),
    "429": Fault(status=429, code="TooManyRequests"),
    "no answer": Fault(is_refused=True),
    "slow": Fault(pause_s=0.05),
}


@pytest.mark.parametrize("storm", STORMS)
def test_a_storm_passes_with_one_line_of_warning(
    store: ObjectStore, proxy: Faulty, caplog: pytest.LogCaptureFixture, storm: str
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: store.put("a/b", b"0123456789"),
        lambda: store.get("a/b"),
        lambda: store.size("a/b"),
        lambda: store.read_into("a/b", 2, [memoryview(bytearray(4))]),
        lambda: [*store.keys("a/")],
        lambda: store.sweep(3600),
        lambda: store.delete("a/b"),
    ]
    found = []
    with caplog.at_level(logging.WARNING):
        for call in calls:
            proxy.fail(STORMS[storm], times=8)  # more than boto3's own three tries
            found.append(call())
            warnings = [record.getMessage() for record in caplog.records if record.name == "storage.patience"]
            if storm != "slow":
                assert len(warnings) == 1
                assert warnings[0].endswith("Asking again for up to 60 s.")
            caplog.clear()

    assert found == [None, b"0123456789", 10, 10, ["a/b"], 0, None]
    with pytest.raises(ObjectMissing):
        store.get("a/b")


def test_bodies_that_break_off_are_read_on(store: ObjectStore, proxy: Faulty) -> None:
    data = secrets.token_bytes(20_000_000)
    store.put("a", data)
    proxy.fail(Fault(is_cut=True, method="GET"), times=12)

    assert store.get("a") == data


def test_a_listing_that_breaks_off_tells_every_object_once() -> None:
    class Broken:
        times = 3

        def entries(self, prefix: str = "") -> Iterator[StoredObject]:
            for number in range(4):
                if number == self.times:
                    self.times -= 1
                    raise StoreUnavailable
                yield StoredObject(f"a/{number}", 1, datetime.now(UTC))

    store = PatientStore(Broken(), LONG_S)  # type: ignore[arg-type]

    assert sorted(store.keys("a/")) == ["a/0", "a/1", "a/2", "a/3"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(status=403, code="InvalidAccessKeyId"), StoreDenied),
        (Fault(status=404, code="NoSuchBucket"), StoreUnusable),
        (Fault(status=403, code="RequestTimeTooSkewed"), StoreUnusable),
        (Fault(status=507, code="InsufficientStorage"), StoreFull),
        (Fault(status=400, code="EntityTooLarge"), ObjectStoreError),
    ],
)
def test_what_a_person_must_mend_is_asked_once(
    store: ObjectStore, proxy: Faulty, fault: Fault, expected: type[ObjectStoreError]
) -> None:
    proxy.fail(fault)

    with pytest.raises(expected) as caught:
        store.put("a", b"1")

    assert not caught.value.retryable
    assert 1 <= len(proxy.requests) <= 3  # boto3 asks again for a full disk
    proxy.heal()
    assert [*store.keys()] == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=301, code="PermanentRedirect", more="<Region>eu-west-1</Region>"),
        Fault(status=400, code="AuthorizationHeaderMalformed", more="<Region>eu-west-1</Region>"),
    ],
    ids=lambda fault: fault.code,
)
def test_another_region_is_told_with_its_name(settings: StorageSettings, fault: Fault) -> None:
    with faulty() as amazon:
        amazon.fail(fault)
        elsewhere = settings.model_copy(update={"s3_endpoint_url": amazon.endpoint_url})
        with closing(open_store(elsewhere)) as store:
            for call in (lambda: store.put("a", b"1"), lambda: store.get("a"), lambda: [*store.keys()]):
                with pytest.raises(WrongRegion, match="Set PLATEMAKER_S3_REGION to eu-west-1") as caught:
                    call()
                assert caught.value.expected == "eu-west-1"


def test_a_redirection_that_names_no_region_names_the_setting(settings: StorageSettings) -> None:
    with faulty() as amazon:
        amazon.fail(Fault(status=301, code="PermanentRedirect"))
        elsewhere = settings.model_copy(update={"s3_endpoint_url": amazon.endpoint_url})
        with closing(open_store(elsewhere)) as store, pytest.raises(WrongRegion, match="PLATEMAKER_S3_REGION or PLAT"):
            store.put("a", b"1")


def test_patience_has_an_end_and_starts_anew_with_the_next_success(
    settings: StorageSettings, proxy: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_store(settings.model_copy(update={"patience_s": 0.05}))) as store:
        proxy.fail(Fault(status=503, code="SlowDown"))
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match=r"SlowDown \(503\).*PLATEMAKER_PATIENCE_S"):
                store.put("a", b"1")
        proxy.heal()
        store.put("a", b"2")

        assert store.get("a") == b"2"
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_one_object_that_cannot_be_had_does_not_wait_for_ever_while_others_can() -> None:
    patience = Patience(0.05)

    def fail() -> None:
        patience.succeeded()  # somebody else's call
        raise StoreUnavailable

    with pytest.raises(StoreUnavailable):
        patience.call(fail)


def test_nothing_is_waited_for_once_the_process_is_told_to_stop() -> None:
    stopping = threading.Event()
    patience = Patience(LONG_S, stopping=stopping)
    asked = []

    def fail() -> None:
        asked.append(1)
        if len(asked) == 3:
            stopping.set()
        raise StoreUnavailable

    with pytest.raises(StoreUnavailable):
        patience.call(fail)
    assert len(asked) == 3


def test_a_folder_that_is_away_for_a_while_goes_unnoticed(tmp_path: Path) -> None:
    root = tmp_path / "objects"
    store = open_store(StorageSettings(store_url=str(root)))
    store.put("a", b"1")
    root.rename(tmp_path / "unmounted")
    back = threading.Timer(0.1, (tmp_path / "unmounted").rename, [root])
    back.start()

    assert store.get("a") == b"1"
    back.join()


def test_the_check_notices_other_bytes(tmp_path: Path) -> None:
    class Liar(FolderStore):
        def get(self, key: str) -> bytes:
            return super().get(key)[:-1]

    store = Liar(tmp_path)

    with pytest.raises(StorageError, match="other bytes"):
        check_store(store)
    assert [*store.keys()] == []
