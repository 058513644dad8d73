"""Cards that are not here are played by their libraries' names."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tasks.device_metrics import DeviceCollector


def values(collector: DeviceCollector) -> dict[tuple[str, str], float]:
    return {
        (sample.name.removeprefix("platemaker_device_"), sample.labels["device"]): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def module(name: str, **functions: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(functions)
    return made


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pymtml", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_machine_without_cards_tells_of_itself() -> None:
    found = values(DeviceCollector())

    assert {device for _, device in found} == {"cpu"}
    assert 0 < found["memory_used_bytes", "cpu"] <= found["memory_bytes", "cpu"]
    assert 0 <= found["busy_ratio", "cpu"] <= 1


def test_every_nvidia_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    library = module(
        "pynvml",
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=10 * card, total=100),
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=50),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)

    found = values(DeviceCollector())

    assert (found["memory_used_bytes", "cuda:1"], found["memory_bytes", "cuda:0"]) == (10, 100)
    assert found["busy_ratio", "cuda:0"] == 0.5


def test_every_handle_of_a_moore_threads_card_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []

    def give(kind: str) -> Any:
        return lambda _of: held.append(kind) or kind

    library = module(
        "pymtml",
        mtmlLibraryInit=lambda: None,
        mtmlLibraryCountDevice=lambda: 1,
        mtmlLibraryInitDeviceByIndex=give("card"),
        mtmlDeviceInitMemory=give("memory"),
        mtmlDeviceInitGpu=give("gpu"),
        mtmlMemoryGetUsed=lambda memory: 7,
        mtmlMemoryGetTotal=lambda memory: 70,
        mtmlGpuGetUtilization=lambda gpu: 25,
        mtmlDeviceFreeMemory=held.remove,
        mtmlDeviceFreeGpu=held.remove,
        mtmlLibraryFreeDevice=held.remove,
    )
    monkeypatch.setitem(sys.modules, "pymtml", library)

    found = values(DeviceCollector())

    assert (found["memory_used_bytes", "musa:0"], found["busy_ratio", "musa:0"]) == (7, 0.25)
    assert held == []


def test_a_library_without_its_driver_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "pynvml", module("pynvml", nvmlInit=no_driver))

    assert {device for _, device in values(DeviceCollector())} == {"cpu"}
