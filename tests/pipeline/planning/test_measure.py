import multiprocessing
from pathlib import Path

import pytest

from kernels.settings import KernelSettings
from pipeline.errors import PlanError
from pipeline.local_servers import SeaweedFS
from pipeline.planning.measure import busy_beside, measure_device
from storage.objects import open_store, scratch_store
from storage.settings import StorageSettings
from tasks.engine import Engine


@pytest.fixture
def folder_storage(tmp_path: Path) -> StorageSettings:
    return StorageSettings(data_dir=tmp_path)


@pytest.fixture
def s3_storage(s3_server: SeaweedFS, tmp_path: Path) -> StorageSettings:
    own = {"data_dir": tmp_path, "store_url": f"{s3_server.url}/{tmp_path.name}"}
    return s3_server.settings().model_copy(update=own)


@pytest.mark.parametrize(("kind", "at_once"), [("folder", 2), ("s3", 1)])
def test_a_machine_is_measured_in_its_own_store_and_nothing_is_left_there(
    kind: str, at_once: int, tiny_model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage: StorageSettings = request.getfixturevalue(f"{kind}_storage")
    monkeypatch.setattr("pipeline.planning.measure.REPEATS", 1)
    open_store(storage).put("manifests/theirs", b"stays")
    told: list[str] = []

    device = measure_device(
        Engine(KernelSettings(model=str(tiny_model), max_batch=4, threads=1)),
        storage,
        "here",
        told.append,
        at_once=at_once,
    )

    assert device.prefill_s(1000) > 0
    assert device.document_overhead_s > 0
    assert sum("beside this one" in text for text in told) == at_once - 1
    assert list(open_store(storage).keys()) == ["manifests/theirs"]


def test_a_process_that_cannot_work_beside_is_told_of(tmp_path: Path) -> None:
    kernel = KernelSettings(model=str(tmp_path / "nothing"))

    with (
        pytest.raises(PlanError, match=r"did not begin: .*nothing"),
        busy_beside(kernel, StorageSettings(data_dir=tmp_path), 1, lambda _text: None),
    ):
        raise AssertionError("nothing works beside")


def test_a_process_that_ends_too_soon_is_told_of(tiny_model: Path, tmp_path: Path) -> None:
    kernel = KernelSettings(model=str(tiny_model), max_batch=4, threads=1)

    with (
        pytest.raises(PlanError, match="has ended"),
        busy_beside(kernel, StorageSettings(data_dir=tmp_path), 1, lambda _text: None),
    ):
        (other,) = multiprocessing.active_children()
        other.kill()
        other.join()


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_scratch_store_is_emptied_when_something_fails_too(kind: str, request: pytest.FixtureRequest) -> None:
    storage: StorageSettings = request.getfixturevalue(f"{kind}_storage")
    with pytest.raises(ZeroDivisionError), scratch_store(storage) as scratch:
        store = open_store(scratch)
        store.put("chunks/one", b"1")
        assert list(store.keys()) == ["chunks/one"]
        raise ZeroDivisionError

    assert list(open_store(storage).keys()) == []
    assert not list(storage.data_dir.glob("objects/scratch-*"))
