"""Attention of each new token over its own question, merged with the shared part and written out: one kernel.

Tokens of one question stand side by side in a tile of rows, so a question is read once for several of its tokens and
nothing is padded to the longest. Merging by the log-sum-exp is arXiv:2205.14135's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import Attended
from kernels.triton.launch import pick_precision, power_of_two, rows_apart
from kernels.triton.prefix import fold_in, multiply, soften

BLOCK_KEYS = 64
NUM_STAGES = 2
EVERYTHING = 2**31 - 1  # the widest window an int32 holds


@triton.jit(do_not_specialize=["parts", "rows", "window"])
def _suffix_kernel(
    q_ptr, k_ptr, v_ptr, tiles_ptr, part_out_ptr, part_lse_ptr, sinks_ptr, out_ptr,
    parts, rows, scale, softcap, window,
    stride_qh, stride_qr, stride_ks, stride_kh, stride_kn, stride_vs, stride_vh, stride_vn,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, KV heads. A tile is (slot, first token, tokens, tokens stored before the first)."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    slot = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    token = tl.load(tiles_ptr + tile * 4 + 1)
    count = tl.load(tiles_ptr + tile * 4 + 2)
    past = tl.load(tiles_ptr + tile * 4 + 3)

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    real = m < count * GROUP
    row = token * GROUP + m
    last = past + m // GROUP  # the token itself
    q_at = q_ptr + head * stride_qh + row[:, None].to(tl.int64) * stride_qr + d[None, :]
    q = tl.load(q_at, mask=real[:, None] & (d[None, :] < D), other=0.0)
    keys = k_ptr + slot * stride_ks + head * stride_kh
    values = v_ptr + slot * stride_vs + head * stride_vh

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    end = past + count
    for start in range(tl.maximum(past - window + 1, 0), end, BLOCK_N):
        at = start + n
        k_at = keys + at[None, :].to(tl.int64) * stride_kn + d[:, None]
        v_at = values + at[:, None].to(tl.int64) * stride_vn + dv[None, :]
        k = tl.load(k_at, mask=(at[None, :] < end) & (d[:, None] < D), other=0.0)
        v = tl.load(v_at, mask=(at[:, None] < end) & (dv[None, :] < DV), other=0.0)
        scores = soften(multiply(q, k, PRECISION), scale, softcap, SOFTCAP)
        visible = (at[None, :] <= last[:, None]) & (at[None, :] > last[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        weights, peak, total, acc = fold_in(scores, peak, total, acc, True)
        acc += multiply(weights.to(v.dtype), v, PRECISION)

    for part in range(parts):
        at = (part * heads + head) * rows + row
        lse = tl.load(part_lse_ptr + at, mask=real, other=float("-inf")) * 1.4426950408889634
        seen = tl.load(
            part_out_ptr + at[:, None] * DV + dv[None, :], mask=real[:, None] & (dv[None, :] < DV), other=0.0
        )
        weights, peak, total, acc = fold_in(lse[:, None], peak, total, acc, True)
        acc += weights * seen
    if sinks_ptr is not None:  # one more key per query head, whose value is zero
        sink = tl.load(sinks_ptr + head * GROUP + m % GROUP).to(tl.float32) * 1.4426950408889634
        weights, peak, total, acc = fold_in(sink[:, None], peak, total, acc, False)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    query_head = head * GROUP + m % GROUP
    to = ((token + m // GROUP) * (heads * GROUP) + query_head)[:, None] * DV + dv[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dv[None, :] < DV))


def tile_rows(group: int) -> int:
    """Rows of a tile for `group` query heads a KV head."""
    return power_of_two(group)


def plan_tiles(counts: list[int], lengths: list[int], group: int, device: torch.device) -> Tensor:
    """Tiles int32 [tiles, 4]; `counts[i]` new tokens of slot i stand behind its `lengths[i]` stored ones."""
    tokens = tile_rows(group) // group
    tiles, token = [], 0
    for slot, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for offset in range(0, count, tokens):
            tiles.append((slot, token + offset, min(tokens, count - offset), length + offset))
        token += count
    return torch.tensor(tiles, dtype=torch.int32).to(device, non_blocking=True)


def suffix_merge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    parts: Attended,
    *,
    group: int,
    scale: float,
    window: int = EVERYTHING,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The whole attention of every new token: [tokens, query_heads, v_dim] in q's dtype.

    q is folded [kv_heads, rows, head_dim] with `group` rows a token; k and v [slots, kv_heads, capacity, head_dim or
    v_dim] hold the new tokens already. `parts` is what the rows saw of the document: out [parts, kv_heads, rows,
    v_dim], lse [parts, kv_heads, rows], contiguous fp32. `sinks` [query_heads] are scores of one more key whose value
    is zero.
    """
    heads, rows, head_dim = q.shape
    v_dim = v.shape[-1]
    q, k, v = rows_apart(q), rows_apart(k), rows_apart(v)
    out = torch.empty((rows // group, heads * group, v_dim), dtype=q.dtype, device=q.device)
    _suffix_kernel[tiles.shape[0], heads](
        q, k, v, tiles, parts.out, parts.lse, sinks, out,
        parts.out.shape[0], rows, scale, softcap or 0.0, min(window, EVERYTHING),
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3],
        GROUP=group, D=head_dim, DV=v_dim, BLOCK_D=power_of_two(head_dim), BLOCK_DV=power_of_two(v_dim),
        BLOCK_M=tile_rows(group), BLOCK_N=BLOCK_KEYS, SOFTCAP=softcap is not None,
        PRECISION=pick_precision(q), num_warps=4, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
