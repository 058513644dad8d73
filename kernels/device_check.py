"""Runs every op the engine needs on a device and says what holds: for `platemaker doctor --device`."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.device import pick_device
from kernels.device_ops import Missing, Op, ops_of, sampling_op

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TIMED_RUNS = 3


@dataclass(frozen=True)
class OpResult:
    """`error` is compared with float64; `ms` is the median time of a run. Both are None where nothing ran.

    `state` is unavailable where the device or this installation has no such thing and the engine does without it;
    `detail` then says why, as it does for what failed.
    """

    op: str
    dtype: str
    implementation: str
    state: Literal["ok", "failed", "unavailable"]
    error: float | None
    tolerance: float
    ms: float | None
    detail: str = ""


def describe_device(device: torch.device) -> str:
    """Its name as the driver says it."""
    if device.type == "cpu":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name else device.type


def check_device(wanted: str) -> Iterator[OpResult]:
    """Each op in each dtype as it is done; none stops another.

    Raises:
        DeviceUnavailable: the device is not there. Nothing was run then.
    """
    device = pick_device(wanted)
    return _results(device)


def _results(device: torch.device) -> Iterator[OpResult]:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        try:
            ones = torch.ones(4, 4, device=device, dtype=dtype)
            _ = (ones @ ones).tolist()
        except (RuntimeError, NotImplementedError) as exc:
            yield OpResult("matrix product", name, "torch", "unavailable", None, 0.0, None, _sentence(exc))
            continue
        for op in ops_of(device, dtype):
            yield _try(op, name, device)
    yield _try(sampling_op(device), "float32", device)


@torch.inference_mode()
def _try(op: Op, dtype: str, device: torch.device) -> OpResult:
    def result(state: Literal["ok", "failed", "unavailable"], detail: str = "") -> OpResult:
        return OpResult(op.name, dtype, op.implementation, state, error, op.tolerance, ms, detail)

    error = ms = None
    try:
        trial = op.prepare()
        error = trial.measure(trial.run())
        ms = statistics.median(_timed(trial.run, device) for _ in range(TIMED_RUNS))
    except Missing as exc:
        return result("unavailable", str(exc))
    except Exception as exc:  # drivers and compilers fail in any way they like, and the next op has to be tried
        return result("failed", _sentence(exc))
    if not error <= op.tolerance:  # NaN, too
        return result("failed", "its numbers are too far from float64")
    return result("ok")


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds."""
    _synchronise(device)
    began = time.perf_counter()
    run()
    _synchronise(device)
    return (time.perf_counter() - began) * 1e3


def _synchronise(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def _sentence(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {(str(exc).strip() or 'no message').splitlines()[0]}"
