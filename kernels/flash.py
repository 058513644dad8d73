"""Prefill's attention by the device's own flash attention, where that returns its log-sum-exp.

Its causal mask is aligned to the first key, so a chunk in the middle of a document is attended in two parts, all that
stands before it and itself, merged by their log-sum-exp (arXiv:2205.14135).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention import Attended, attend, fold, merge, plan_blocks

HALVES = (torch.float16, torch.bfloat16)


class Flash(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q, k, v [1, query_heads, tokens, head_dim] -> out [1, query_heads, tokens, head_dim], lse fp32."""


class Device(NamedTuple):
    flash: Flash
    max_head_dim: int


def _cuda(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _musa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Written after torch_musa's declaration of the operator; it has not run on a MUSA device yet."""
    attended = torch.ops.aten._scaled_dot_product_attention_flash_musa(q, k, v, None, 0.0, causal, scale=scale)
    return attended[0], attended[1]


DEVICES: dict[str, Device] = {"cuda": Device(_cuda, 256), "musa": Device(_musa, 128)}


def can_flash(q: Tensor, k: Tensor, v: Tensor, *, window: int, softcap: float | None) -> bool:
    """Whether `flash_attend` can use the device's own attention for these."""
    device = DEVICES.get(q.device.type)
    return (
        device is not None
        and q.dtype in HALVES
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] == v.shape[-1] <= device.max_head_dim
        and q.shape[-1] % 8 == 0
        and softcap is None
        and window >= k.shape[1]
    )


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
    kv_heads, keys = k.shape[:2]
    tokens, group = q.shape[1], q.shape[0] // kv_heads
    if not can_flash(q, k, v, window=window, softcap=softcap):
        if otherwise is not None:
            return otherwise()
        stop = torch.arange(keys - tokens + 1, keys + 1).repeat_interleave(group)
        blocks = plan_blocks(stop - window, stop, device=q.device)
        return attend(fold(q, kv_heads), k, v, blocks, scale=scale, softcap=softcap)
    flash = DEVICES[q.device.type].flash
    past = keys - tokens
    parts = []
    for begin, end, causal in ((past, keys, True), (0, past, False)):
        if begin < end:
            out, lse = flash(q[None], _spread(k[:, begin:end], group), _spread(v[:, begin:end], group),
                             causal=causal, scale=scale)  # fmt: skip
            parts.append(Attended(out[0].float(), lse[0]))
    whole = merge(*parts) if len(parts) == 2 else parts[0]
    return Attended(fold(whole.out, kv_heads), fold(whole.lse[..., None], kv_heads)[..., 0])


def _spread(tensor: Tensor, group: int) -> Tensor:
    """[kv_heads, keys, head_dim] as [1, query_heads, keys, head_dim], each KV head repeated for its group."""
    return tensor[:, None].expand(-1, group, -1, -1).flatten(0, 1)[None]
