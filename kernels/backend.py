"""Which implementation of attention a device uses."""

import importlib
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from kernels.attention import Attended
from kernels.native import linear
from kernels.native.backend import NativeBackend, load_library
from kernels.rows import DecodeRows, PrefillRows
from kernels.torch_backend import TorchBackend

log = logging.getLogger(__name__)

TRITON_DEVICES = ("cuda",)
TRITON_DTYPES = (torch.float16, torch.bfloat16)  # exact fp32 has no tensor cores; there the kernels spill registers
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # of numbers around 1


class AttentionBackend(Protocol):
    """Stateless. Keys and values may be views of larger buffers; their last axis is contiguous.

    A token sees itself and the `window` - 1 before it. `softcap` is the largest size of a score, after `scale`.
    """

    name: str

    def prefill(
        self, rows: PrefillRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        """q [query_heads, tokens, head_dim] over a document whose KV k, v [kv_heads, keys, head_dim or v_dim] ends
        with these tokens' own. The result is folded."""

    def shared(
        self, rows: DecodeRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        """Folded q [kv_heads, rows, head_dim] over the document k, v [kv_heads, keys, head_dim or v_dim], which
        reaches up to where each slot begins. A first axis of the result counts parts of the document; it is for
        `own_and_merge`."""

    def own_and_merge(
        self,
        rows: DecodeRows,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: Attended,
        *,
        scale: float,
        window: int,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The whole attention [tokens, query_heads, v_dim] in q's dtype: `shared` and what each token sees of its own
        slot in k, v [slots, kv_heads, capacity, head_dim or v_dim], which hold the new tokens already. `sinks`
        [query_heads] are scores of one more key whose value is zero."""


@lru_cache
def pick_backend(device: torch.device, head_dim: int, dtype: torch.dtype) -> AttentionBackend:
    """What is made for the device, where it runs and passes a comparison with plain torch; else plain torch. What fails
    is said in the log."""
    made = made_for(device, dtype)
    if made is None:
        return TorchBackend()
    name, make = made
    try:
        fast = make()
        error = largest_error(fast, TorchBackend(), device, head_dim, dtype)
    except Exception as exc:  # a compiler that fails does so in any way it likes
        log.warning("attention runs in plain torch: %s failed with %s: %s", name, type(exc).__name__, exc)
        return TorchBackend()
    if not error <= TOLERANCE[dtype]:
        log.warning("attention runs in plain torch: results of %s are off by %.2g", name, error)
        return TorchBackend()
    return fast


def quicken_model(model: nn.Module, device: torch.device) -> None:
    """Makes the model's linear layers quick for few rows, where that is possible and right; else they stay as they are,
    and the log says why."""
    if device.type != "cpu":
        return
    try:
        library = load_library()
        error = linear.largest_error(library)
    except Exception as exc:  # as above
        log.warning("linear layers run in plain torch: native code failed with %s: %s", type(exc).__name__, exc)
        return
    if not error <= TOLERANCE[torch.float32]:
        log.warning("linear layers run in plain torch: results of native code are off by %.2g", error)
        return
    linear.quicken(model, library)


def made_for(device: torch.device, dtype: torch.dtype) -> tuple[str, Callable[[], AttentionBackend]] | None:
    """What is faster than plain torch there, by name."""
    if device.type in TRITON_DEVICES and dtype in TRITON_DTYPES:
        return "Triton", _triton
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        return "native code", NativeBackend
    return None


def _triton() -> AttentionBackend:
    """Imported here: only where Triton is installed."""
    backend: AttentionBackend = importlib.import_module("kernels.triton.backend").TritonBackend()
    return backend


def largest_error(
    backend: AttentionBackend, reference: AttentionBackend, device: torch.device, head_dim: int, dtype: torch.dtype
) -> float:
    """Of the attention of random tokens behind a random document, with and without window and softcap."""
    generator = torch.Generator().manual_seed(20261130)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    kv_heads, group, keys, scale = 2, 3, 300, head_dim**-0.5
    counts, lengths = [3, 1, 2], [0, 7, 40]
    tokens = sum(counts)
    q, k, v = (
        random(kv_heads, tokens * group, head_dim),
        random(kv_heads, 330, head_dim),
        random(kv_heads, 330, head_dim),
    )
    k, v = k[:, :keys], v[:, :keys]
    own_k, own_v = random(3, kv_heads, 48, head_dim), random(3, kv_heads, 48, head_dim)
    chunk = random(kv_heads * group, 70, head_dim)
    errors = []
    for window, softcap in ((1 << 40, None), (60, 5.0)):
        made: list[Tensor] = []
        for each in (backend, reference):
            rows = DecodeRows(counts, lengths, device)
            shared = each.shared(rows, q, k, v, scale=scale, window=window, softcap=softcap)
            made.append(each.own_and_merge(rows, q, own_k, own_v, shared, scale=scale, window=window, softcap=softcap))
            read = each.prefill(PrefillRows(70, device), chunk, k, v, scale=scale, window=window, softcap=softcap)
            made += [read.out, read.lse]
        errors += [(found - expected).abs().max().float() for found, expected in zip(made[:3], made[3:], strict=True)]
    return float(torch.stack(errors).max())  # NaN if one of them is
