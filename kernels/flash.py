"""Prefill's attention by the device's own flash attention, where that returns its log-sum-exp.

Its causal mask is aligned to the first key, so a chunk in the middle of a document is attended in two parts, all that
stands before it and itself, merged by their log-sum-exp (arXiv:2205.14135).
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention import Attended, attend, fold, merge, plan_blocks

log = logging.getLogger(__name__)

TOLERANCE = 3e-2  # of numbers around 1, in bfloat16
HALVES = (torch.float16, torch.bfloat16)


class Flash(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q [1, query_heads, rows, head_dim], k and v [1, kv_heads, keys, head_dim] -> out like q, lse fp32 [1,
        query_heads, rows]."""


class Device(NamedTuple):
    flash: Flash
    max_head_dim: int


def _cuda(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _musa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Written after torch_musa's declaration of the operator; it has not run on a MUSA device yet."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    attended = torch.ops.aten._scaled_dot_product_attention_flash_musa(q, k, v, None, 0.0, causal, scale=scale)
    return attended[0], attended[1]


DEVICES: dict[str, Device] = {"cuda": Device(_cuda, 256), "musa": Device(_musa, 128)}


def can_flash(q: Tensor, k: Tensor, v: Tensor, *, window: int, softcap: float | None) -> bool:
    """Whether `flash_attend` uses the device's own attention for these."""
    device = DEVICES.get(q.device.type)
    return (
        device is not None
        and q.dtype in HALVES
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] == v.shape[-1] <= device.max_head_dim
        and q.shape[-1] % 8 == 0
        and softcap is None
        and window >= k.shape[1]
        and _is_right(q.device, q.shape[-1], q.dtype)
    )


@lru_cache
def _is_right(device: torch.device, head_dim: int, dtype: torch.dtype) -> bool:
    """Compares it with ours on random tokens, once; the operators are not part of torch's stable interface."""
    generator = torch.Generator().manual_seed(20261130)
    q, k, v = (torch.randn((n, 90, head_dim), generator=generator).to(device, dtype) for n in (6, 2, 2))
    q, scale = q[:, 50:], head_dim**-0.5
    try:
        found = _in_two_parts(q, k, v, scale)
    except (RuntimeError, AttributeError, NotImplementedError) as exc:
        log.warning("prefill does without the device's flash attention: %s", exc)
        return False
    expected = plain_attend(q, k, v, scale=scale, window=90, softcap=None)
    error = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    if not error <= TOLERANCE:
        log.warning("prefill does without the device's flash attention: its results are off by %.2g", error)
    return error <= TOLERANCE


def flash_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float | None = None,
    otherwise: Callable[[], Attended] | None = None,
) -> Attended:
    """Causal attention of a document's last tokens q [query_heads, tokens, head_dim]; the result is folded.

    k and v [kv_heads, keys, head_dim] end with these tokens' own; each token sees itself and the window - 1 before it.
    `otherwise` computes the same where the device's own attention cannot (default: `attend`).
    """
    if can_flash(q, k, v, window=window, softcap=softcap):
        return _in_two_parts(q, k, v, scale)
    return otherwise() if otherwise is not None else plain_attend(q, k, v, scale=scale, window=window, softcap=softcap)


def _in_two_parts(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Attended:
    flash = DEVICES[q.device.type].flash
    kv_heads, keys = k.shape[:2]
    past = keys - q.shape[1]
    out, lse = flash(q[None], k[None, :, past:], v[None, :, past:], causal=True, scale=scale)
    whole = Attended(out[0].float(), lse[0])
    if past:
        out, lse = flash(q[None], k[None, :, :past], v[None, :, :past], causal=False, scale=scale)
        whole = merge(whole, Attended(out[0].float(), lse[0]))
    return Attended(fold(whole.out, kv_heads), fold(whole.lse[..., None], kv_heads)[..., 0])


def plain_attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None) -> Attended:
    """The same in plain torch, on any device."""
    kv_heads, keys = k.shape[:2]
    stop = torch.arange(keys - q.shape[1] + 1, keys + 1).repeat_interleave(q.shape[0] // kv_heads)
    blocks = plan_blocks(stop - window, stop, device=q.device)
    return attend(fold(q, kv_heads), k, v, blocks, scale=scale, softcap=softcap)
