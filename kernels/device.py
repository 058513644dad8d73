"""Which device to compute on, and in which type."""

import importlib
import importlib.util
import os
from pathlib import Path

import torch

from kernels.errors import DeviceUnavailable


def available_devices() -> tuple[str, ...]:
    """The kinds of device present, best first. torch_musa makes itself known to torch when imported."""
    found = []
    if importlib.util.find_spec("torch_musa") is not None:
        importlib.import_module("torch_musa")
    musa = getattr(torch, "musa", None)
    if musa is not None and musa.is_available():
        found.append("musa")
    if torch.cuda.is_available():
        found.append("cuda")
    return (*found, "cpu")


def pick_device(wanted: str) -> torch.device:
    """`auto`, a kind, or a kind with an index.

    Raises:
        DeviceUnavailable: the kind is not present, or the index is no number.
    """
    found = available_devices()
    kind = found[0] if wanted == "auto" else wanted.partition(":")[0]
    if kind not in found:
        raise DeviceUnavailable(wanted, found, hint=_why_missing(kind))
    try:
        return torch.device(kind if wanted == "auto" else wanted)
    except RuntimeError as exc:
        raise DeviceUnavailable(wanted, found) from exc


def _why_missing(kind: str) -> str:
    if kind != "musa":
        return ""
    if importlib.util.find_spec("torch_musa") is None:
        return "torch_musa is not installed in this environment. "
    return "torch_musa is installed, but it sees no card. "


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """bfloat16 on accelerators and on CPUs with bfloat16 matrix instructions, else float32."""
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    if device.type != "cpu" or cpu_is_fast_at_bf16():
        return torch.bfloat16
    return torch.float32


def cpu_is_fast_at_bf16() -> bool:
    """Whether it has instructions that multiply bfloat16."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def set_threads(threads: int) -> None:
    """Uses `threads` CPU threads; 0 means as many as this process may run on."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
