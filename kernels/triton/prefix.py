"""Attention of many rows over one document, split along its keys.

The running softmax is arXiv:1805.02867; splitting the keys and merging by the log-sum-exp is Flash-Decoding's
(arXiv:2307.08691, arXiv:2311.01282); many questions as rows over one prefix is Hydragen's (arXiv:2402.05099).
`kernels.attention.attend` is the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import Attended
from kernels.triton.launch import Blocks, pick_blocks, pick_precision, power_of_two, rows_apart, split_keys

MERGED_AT_ONCE = 64


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def soften(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores as exponents of two. tanh(x) is 2 sigmoid(2 x) - 1."""
    scores = scores * scale
    if SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores * 1.4426950408889634


@triton.jit
def fold_in(scores, peak, total, acc, CAN_BE_EMPTY: tl.constexpr):
    """Takes up scores [rows, keys]: weights of the keys, and peak, total and acc as they are afterwards."""
    new = tl.maximum(peak, tl.max(scores, 1))
    shift = new
    if CAN_BE_EMPTY:  # a row that has seen no key yet is shifted by 0 so that nothing becomes NaN
        shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    return weights, new, total * decay + tl.sum(weights, 1), acc * decay[:, None]


@triton.jit
def finish(peak, total, acc):
    """Normalised acc and natural log-sum-exp; zero and -inf for a row without keys."""
    total = tl.where(total == 0.0, 1.0, total)
    return acc / total[:, None], (peak + tl.log2(total)) * 0.6931471805599453


@triton.jit
def _attend_range(
    peak, total, acc, q, first, stop, keys, values, stride_kn, stride_vn, begin, end, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys [begin, end), of which row r sees first[r] <= key < stop[r]; all of them where not MASKED."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    keys += tl.cast(begin, tl.int64) * stride_kn
    values += tl.cast(begin, tl.int64) * stride_vn
    for start in range(begin, end, BLOCK_N):
        k_at = keys + (n[None, :] * stride_kn + d[:, None])
        v_at = values + (n[:, None] * stride_vn + dv[None, :])
        left = end - start
        if MASKED:
            k = tl.load(k_at, mask=(n[None, :] < left) & (d[:, None] < D), other=0.0)
            v = tl.load(v_at, mask=(n[:, None] < left) & (dv[None, :] < DV), other=0.0)
        else:
            k = tl.load(k_at) if D == BLOCK_D else tl.load(k_at, mask=d[:, None] < D, other=0.0)
            v = tl.load(v_at) if DV == BLOCK_DV else tl.load(v_at, mask=dv[None, :] < DV, other=0.0)
        scores = soften(multiply(q, k, PRECISION), scale, softcap, SOFTCAP)
        if MASKED:
            at = start + n[None, :]
            visible = (at >= first[:, None]) & (at < stop[:, None]) & (n[None, :] < left)
            scores = tl.where(visible, scores, float("-inf"))
        weights, peak, total, acc = fold_in(scores, peak, total, acc, MASKED)
        acc += multiply(weights.to(v.dtype), v, PRECISION)
        keys += BLOCK_N * stride_kn
        values += BLOCK_N * stride_vn
    return peak, total, acc


@triton.jit(do_not_specialize=["rows", "begin", "end", "split_keys"])
def _prefix_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, stop_ptr, out_ptr, lse_ptr, rows, begin, end, split_keys, scale, softcap,
    stride_qh, stride_qr, stride_kh, stride_kn, stride_vh, stride_vn,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows (side by side, so that they share what they read), heads, parts of the keys."""
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    real = m < rows
    q_at = q_ptr + head * stride_qh + m[:, None].to(tl.int64) * stride_qr + d[None, :]
    q = tl.load(q_at, mask=real[:, None] & (d[None, :] < D), other=0.0)

    low = begin + part * split_keys
    high = tl.minimum(low + split_keys, end)
    all_low, all_high = low, high  # what every row of the block sees
    first = tl.full([BLOCK_M], 0, tl.int32) + low
    stop = tl.full([BLOCK_M], 0, tl.int32) + high
    if first_ptr is not None:
        first = tl.load(first_ptr + m, mask=real, other=2147483647)
        low = tl.maximum(low, tl.min(first, 0))
        all_low = tl.maximum(low, tl.max(tl.where(real, first, 0), 0))
    if stop_ptr is not None:
        stop = tl.load(stop_ptr + m, mask=real, other=0)
        high = tl.minimum(high, tl.max(stop, 0))
        all_high = tl.minimum(high, tl.min(tl.where(real, stop, 2147483647), 0))
    full = tl.minimum(low + tl.cdiv(tl.maximum(all_low - low, 0), BLOCK_N) * BLOCK_N, tl.maximum(low, high))
    tail = full + tl.maximum(all_high - full, 0) // BLOCK_N * BLOCK_N

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    keys = k_ptr + head * stride_kh
    values = v_ptr + head * stride_vh
    if first_ptr is not None:
        peak, total, acc = _attend_range(
            peak, total, acc, q, first, stop, keys, values, stride_kn, stride_vn, low, full, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, SOFTCAP, PRECISION,
        )  # fmt: skip
    peak, total, acc = _attend_range(
        peak, total, acc, q, first, stop, keys, values, stride_kn, stride_vn, full, tail, scale, softcap,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, SOFTCAP, PRECISION,
    )  # fmt: skip
    peak, total, acc = _attend_range(
        peak, total, acc, q, first, stop, keys, values, stride_kn, stride_vn, tail, high, scale, softcap,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, SOFTCAP, PRECISION,
    )  # fmt: skip
    out, lse = finish(peak, total, acc)
    row = (part * tl.num_programs(1) + head) * rows + m
    tl.store(out_ptr + row[:, None] * DV + dv[None, :], out, mask=real[:, None] & (dv[None, :] < DV))
    tl.store(lse_ptr + row, lse, mask=real)


@triton.jit(do_not_specialize=["parts", "rows"])
def _merge_kernel(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, parts, rows,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program for each of `rows` rows of all heads."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV)
    peak, total, acc = merge_parts(part_out_ptr, part_lse_ptr, parts, row, rows, dv, DV, BLOCK_DV, AT_ONCE)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * DV + dv, acc / total, mask=dv < DV)
    tl.store(lse_ptr + row, (peak + tl.log2(total)) * 0.6931471805599453)


@triton.jit
def merge_parts(
    out_ptr, lse_ptr, parts, row, rows, dv, DV: tl.constexpr, BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Peak (as an exponent of two), total and acc [v_dim] of one row over all parts."""
    s = tl.arange(0, AT_ONCE)
    peak = float("-inf")
    for start in range(0, parts, AT_ONCE):
        lse = tl.load(lse_ptr + (start + s) * rows + row, mask=start + s < parts, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(lse * 1.4426950408889634, 0))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, parts, AT_ONCE):
        here = (start + s) < parts
        at = (start + s) * rows + row
        lse = tl.load(lse_ptr + at, mask=here, other=float("-inf"))
        out = tl.load(out_ptr + at[:, None] * DV + dv[None, :], mask=here[:, None] & (dv[None, :] < DV), other=0.0)
        weights = tl.exp2(lse * 1.4426950408889634 - shift)
        total += tl.sum(weights, 0)
        acc += tl.sum(weights[:, None] * out, 0)
    return peak, total, acc


def prefix_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    first: Tensor | None = None,
    stop: Tensor | None = None,
    begin: int = 0,
    blocks: Blocks | None = None,
) -> Attended:
    """The attention of each part of the keys alone: out [parts, kv_heads, rows, v_dim], lse [parts, kv_heads, rows].

    q is folded [kv_heads, rows, head_dim]; k and v are [kv_heads, keys, head_dim or v_dim], any view whose last axis
    is contiguous. Row r sees the keys first[r] <= key < stop[r] (int32 [rows] on the device; none: all). No row sees
    a key before `begin`.
    """
    heads, rows, head_dim = q.shape
    num_keys, v_dim = v.shape[1:]
    q, k, v = rows_apart(q), rows_apart(k), rows_apart(v)
    blocks = blocks or pick_blocks(rows, head_dim, v_dim, q.dtype)
    row_blocks = triton.cdiv(rows, blocks.rows)
    split = split_keys(num_keys - begin, row_blocks * heads, blocks, q.device)
    out = torch.empty((split.parts, heads, rows, v_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((split.parts, heads, rows), dtype=torch.float32, device=q.device)
    _prefix_kernel[row_blocks, heads, split.parts](
        q, k, v, first, stop, out, lse, rows, begin, num_keys, split.keys, scale, softcap or 0.0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        D=head_dim, DV=v_dim, BLOCK_D=power_of_two(head_dim), BLOCK_DV=power_of_two(v_dim),
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, SOFTCAP=softcap is not None,
        PRECISION=pick_precision(q), num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    return Attended(out, lse)


def merged(parts: Attended) -> Attended:
    """The attention over the keys of all parts: out [kv_heads, rows, v_dim], lse [kv_heads, rows], fp32."""
    count, heads, rows, v_dim = parts.out.shape
    if count == 1:
        return Attended(parts.out[0], parts.lse[0])
    out, lse = torch.empty_like(parts.out[0]), torch.empty_like(parts.lse[0])
    _merge_kernel[(heads * rows,)](
        parts.out, parts.lse, out, lse, count, heads * rows,
        DV=v_dim, BLOCK_DV=power_of_two(v_dim), AT_ONCE=min(power_of_two(count, 1), MERGED_AT_ONCE), num_warps=4,
    )  # fmt: skip
    return Attended(out, lse)


def shared_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    first: Tensor | None = None,
    stop: Tensor | None = None,
    begin: int = 0,
) -> Attended:
    """Like `kernels.attention.attend`; arguments as of `prefix_parts`."""
    return merged(prefix_parts(q, k, v, scale=scale, softcap=softcap, first=first, stop=stop, begin=begin))
