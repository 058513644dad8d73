"""Memory and utilisation of the device, asked when Prometheus scrapes: NVIDIA's or Moore Threads' management library
where it is installed, and the process and machine themselves."""

import importlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import psutil
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    device: str
    used_bytes: int
    total_bytes: int
    busy: float  # 0 to 1


class DeviceCollector(Collector):
    def __init__(self) -> None:
        self._ask = _asker()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        used = GaugeMetricFamily("platemaker_device_memory_used_bytes", "Memory in use.", labels=["device"])
        total = GaugeMetricFamily("platemaker_device_memory_bytes", "Memory of the device.", labels=["device"])
        busy = GaugeMetricFamily("platemaker_device_busy_ratio", "Share of the time it computes.", labels=["device"])
        for reading in (_cpu(), *self._ask()):
            used.add_metric([reading.device], reading.used_bytes)
            total.add_metric([reading.device], reading.total_bytes)
            busy.add_metric([reading.device], reading.busy)
        yield from (used, total, busy)


def _cpu() -> Reading:
    memory = psutil.virtual_memory()
    return Reading("cpu", memory.total - memory.available, memory.total, psutil.cpu_percent() / 100)


def _asker() -> Any:
    """What reads all cards of the machine; nothing where no library is installed or it finds no driver."""
    for name, read in (("pymtml", _mtml), ("pynvml", _nvml)):
        try:
            library = importlib.import_module(name)
            read(library)
        except Exception as exc:  # no library, no driver, no card: each has errors of its own
            logger.debug("no device metrics from %s: %s", name, exc)
        else:
            return lambda library=library, read=read: read(library)
    return tuple


def _nvml(library: ModuleType) -> tuple[Reading, ...]:
    library.nvmlInit()
    readings = []
    for index in range(library.nvmlDeviceGetCount()):
        card = library.nvmlDeviceGetHandleByIndex(index)
        memory = library.nvmlDeviceGetMemoryInfo(card)
        busy = library.nvmlDeviceGetUtilizationRates(card).gpu / 100
        readings.append(Reading(f"cuda:{index}", memory.used, memory.total, busy))
    return tuple(readings)


def _mtml(library: ModuleType) -> tuple[Reading, ...]:
    """By mthreads-ml-py's names (2.4); it has not run on such a card."""
    library.mtmlLibraryInit()
    readings = []
    for index in range(library.mtmlLibraryCountDevice()):
        card = library.mtmlLibraryInitDeviceByIndex(index)
        memory, gpu = library.mtmlDeviceInitMemory(card), library.mtmlDeviceInitGpu(card)
        used, total = library.mtmlMemoryGetUsed(memory), library.mtmlMemoryGetTotal(memory)
        readings.append(Reading(f"musa:{index}", used, total, library.mtmlGpuGetUtilization(gpu) / 100))
        library.mtmlDeviceFreeMemory(memory)
        library.mtmlDeviceFreeGpu(gpu)
        library.mtmlLibraryFreeDevice(card)
    return tuple(readings)
