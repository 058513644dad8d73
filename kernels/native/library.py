"""The functions of our C++, called with pointers; ctypes lets other threads run meanwhile."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1}
OPENMP_NAMES = ("libgomp", "libomp", "libiomp5")  # each has GOMP_parallel


def _fields(**kinds: str) -> list[tuple[str, Any]]:
    """Names in the order of the C++, separated by spaces, by kind."""
    of = {"pointers": c_void_p, "integers": c_int64, "numbers": c_double, "function": c_void_p}
    return [(name, of[kind]) for kind, names in kinds.items() for name in names.split()]


class PrefixCall(Structure):
    _fields_ = _fields(
        pointers="q k v out lse positions",
        integers="q_type kv_type kv_heads group tokens keys dim v_dim q_head q_token q_member k_head k_token v_head "
        "v_token o_head o_token window begin parts rows_per_task threads",
        numbers="scale softcap",
        function="parallel",
    )


class OwnCall(Structure):
    _fields_ = _fields(
        pointers="q k v out shared shared_lse sinks counts lengths",
        integers="q_type kv_type slots kv_heads group tokens dim v_dim q_head q_token q_member k_slot k_head k_token "
        "v_slot v_head v_token window parts rows_per_task threads",
        numbers="scale softcap",
        function="parallel",
    )


class LinearCall(Structure):
    _fields_ = _fields(
        pointers="x w bias out", integers="rows in out_features x_row pairs threads", function="parallel"
    )


class BestCall(Structure):
    _fields_ = _fields(pointers="scores best finite", integers="rows row size threads", function="parallel")


class DecoderLayer(Structure):
    _fields_ = _fields(
        pointers="q k v o gate up down norm q_bias k_bias v_bias q_norm k_norm o_bias mlp_norm gate_bias up_bias "
        "down_bias",
        integers="rotated",
        numbers="norm_eps q_eps k_eps mlp_eps",
    )


class DecoderCall(Structure):
    _fields_ = _fields(
        pointers="x cos sin layers prefix own",
        integers="num_layers documents tokens hidden inner heads kv_heads dim width pairs threads",
        function="parallel",
    )


Call = PrefixCall | OwnCall | LinearCall | BestCall | DecoderCall


class Library:
    """Raises OSError where the file is no library, AttributeError where it is not ours."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._prefix, self._own = library.attend_prefix, library.attend_own
        self._linear, self._best, self._decoder = library.linear, library.best, library.decoder_step
        for function, call in (
            (self._prefix, PrefixCall),
            (self._own, OwnCall),
            (self._linear, LinearCall),
            (self._best, BestCall),
            (self._decoder, DecoderCall),
        ):
            function.argtypes, function.restype = [POINTER(call)], c_int
        self.pairs: int = library.pairs()  # how bfloat16 is multiplied in pairs: 0 not, 1 by vectors, 2 by tiles
        self._parallel = _openmp_of_torch()

    def attend_prefix(self, call: PrefixCall) -> None:
        self._call(self._prefix, call)

    def attend_own(self, call: OwnCall) -> None:
        self._call(self._own, call)

    def linear(self, call: LinearCall) -> None:
        self._call(self._linear, call)

    def best(self, call: BestCall) -> None:
        self._call(self._best, call)

    def decoder_step(self, call: DecoderCall) -> None:
        self._call(self._decoder, call)

    def _call(self, function: Any, call: Call) -> None:
        call.threads = torch.get_num_threads() if self._parallel else 1
        call.parallel = self._parallel
        if function(ctypes.byref(call)):
            raise MemoryError("native code on the CPU found no memory for its blocks")


def _openmp_of_torch() -> int | None:
    """The address of GOMP_parallel in the OpenMP that this process has loaded already, with torch: threads of a second
    one would fight with torch's for the same cores. None where there is no such thing; then one thread computes."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines if ".so" in line}):
        if Path(path).name.startswith(OPENMP_NAMES):
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            return ctypes.cast(function, c_void_p).value if function else None
    return None


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
