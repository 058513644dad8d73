"""Attention over a document whose KV stays int8 in device memory: numbers are made anew in registers.

The storage is the codec `int8`'s (KIVI, arXiv:2402.02750): number = low + level * scale, keys with scales per channel
and chunk of tokens, values with scales per token. 16-bit models multiply in fp16 here: it is finer than bfloat16, and
what lies beyond its range (keys or values above 65,504) has no place in it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import Attended
from kernels.codecs.affine import quantise
from kernels.codecs.base import CHANNELS, TOKENS
from kernels.triton.launch import Blocks, pick_int8_blocks, pick_precision, power_of_two, rows_apart, split_keys
from kernels.triton.prefix import finish, fold_in, merged, multiply, soften


class QuantisedKV(NamedTuple):
    """One layer: `k` and `v` uint8 [kv_heads, tokens, head_dim or v_dim]; `k_scale` and `k_low` [kv_heads, chunks,
    head_dim]; `v_scale` and `v_low` [kv_heads, tokens]. Scales are bfloat16, lows have the model's dtype."""

    k: Tensor
    k_scale: Tensor
    k_low: Tensor
    v: Tensor
    v_scale: Tensor
    v_low: Tensor
    chunk_tokens: int


def quantise_kv(k: Tensor, v: Tensor, chunk_tokens: int) -> QuantisedKV:
    """What the codec `int8` stores of k and v [kv_heads, tokens, head_dim or v_dim], chunk by chunk.

    Raises:
        NonFiniteKV: they hold NaN or infinity.
    """
    keys = quantise(k, axis=TOKENS, group=chunk_tokens, highest=255)
    values = quantise(v, axis=CHANNELS, group=v.shape[-1], highest=255)
    return QuantisedKV(
        keys.levels, keys.scale, keys.low, values.levels, values.scale[..., 0], values.low[..., 0], chunk_tokens
    )


@triton.jit
def _numbers(levels, scale, low, HALF: tl.constexpr):
    """low + level * scale. In fp16 a level x is made by writing its bits behind those of 1024, which is far cheaper
    than converting an integer; it is exact, and centred so that rounding is small."""
    if HALF:
        centred = (levels.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        middle = low.to(tl.float32) + 128.0 * scale.to(tl.float32)
        numbers = centred * scale.to(tl.float16) + middle.to(tl.float16)
    else:
        numbers = levels.to(tl.float32) * scale.to(tl.float32) + low.to(tl.float32)
    return numbers


@triton.jit
def _attend_levels(
    peak, total, acc, q, first, keys, k_scale, k_low, values, v_scale, v_low,
    stride_kn, stride_kc, stride_vn, begin, end, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, HALF: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys [begin, end); `begin` is a multiple of BLOCK_N, so that a block lies in one chunk."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    keys += tl.cast(begin, tl.int64) * stride_kn
    values += tl.cast(begin, tl.int64) * stride_vn
    for start in range(begin, end, BLOCK_N):
        at = start + n
        channel = (start // CHUNK) * stride_kc + d
        here = d < D
        k_at = keys + (n[None, :] * stride_kn + d[:, None])
        v_at = values + (n[:, None] * stride_vn + dv[None, :])
        if MASKED:
            k = tl.load(k_at, mask=(at[None, :] < end) & (d[:, None] < D), other=0)
            v = tl.load(v_at, mask=(at[:, None] < end) & (dv[None, :] < DV), other=0)
            scale_v = tl.load(v_scale + at, mask=at < end, other=0.0)
            low_v = tl.load(v_low + at, mask=at < end, other=0.0)
        else:
            k = tl.load(k_at) if D == BLOCK_D else tl.load(k_at, mask=d[:, None] < D, other=0)
            v = tl.load(v_at) if DV == BLOCK_DV else tl.load(v_at, mask=dv[None, :] < DV, other=0)
            scale_v = tl.load(v_scale + at)
            low_v = tl.load(v_low + at)
        scale_k = tl.load(k_scale + channel, mask=here, other=0.0)
        low_k = tl.load(k_low + channel, mask=here, other=0.0)
        k = _numbers(k, scale_k[:, None], low_k[:, None], HALF)
        scores = soften(multiply(q, k, PRECISION), scale, softcap, SOFTCAP)
        if MASKED:
            visible = (at[None, :] >= first[:, None]) & (at[None, :] < end)
            scores = tl.where(visible, scores, float("-inf"))
        weights, peak, total, acc = fold_in(scores, peak, total, acc, MASKED)
        v = _numbers(v, scale_v[:, None], low_v[:, None], HALF)
        acc += multiply(weights.to(v.dtype), v, PRECISION)
        keys += BLOCK_N * stride_kn
        values += BLOCK_N * stride_vn
    return peak, total, acc


@triton.jit(do_not_specialize=["rows", "begin", "end", "split_keys"])
def _quantised_kernel(
    q_ptr, k_ptr, k_scale_ptr, k_low_ptr, v_ptr, v_scale_ptr, v_low_ptr, first_ptr, out_ptr, lse_ptr,
    rows, begin, end, split_keys, scale, softcap,
    stride_qh, stride_qr, stride_kh, stride_kn, stride_kch, stride_kc, stride_vh, stride_vn, stride_vsh,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows, heads, parts of the keys."""
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    real = m < rows
    q_at = q_ptr + head * stride_qh + m[:, None].to(tl.int64) * stride_qr + d[None, :]
    q = tl.load(q_at, mask=real[:, None] & (d[None, :] < D), other=0.0)
    if HALF:
        q = q.to(tl.float16)

    low = begin + part * split_keys
    high = tl.minimum(low + split_keys, end)
    full = low  # what every row of the block sees begins here
    first = tl.full([BLOCK_M], 0, tl.int32) + low
    if first_ptr is not None:
        first = tl.load(first_ptr + m, mask=real, other=2147483647)
        low = tl.maximum(low, tl.min(first, 0) // BLOCK_N * BLOCK_N)
        full = tl.maximum(low, tl.cdiv(tl.max(tl.where(real, first, 0), 0), BLOCK_N) * BLOCK_N)
        full = tl.minimum(full, tl.maximum(low, high))
    tail = full + tl.maximum(high - full, 0) // BLOCK_N * BLOCK_N

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    keys = k_ptr + head * stride_kh
    values = v_ptr + head * stride_vh
    k_scale = k_scale_ptr + head * stride_kch
    k_low = k_low_ptr + head * stride_kch
    v_scale = v_scale_ptr + head * stride_vsh
    v_low = v_low_ptr + head * stride_vsh
    if first_ptr is not None:
        peak, total, acc = _attend_levels(
            peak, total, acc, q, first, keys, k_scale, k_low, values, v_scale, v_low,
            stride_kn, stride_kc, stride_vn, low, full, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, CHUNK, HALF, True, SOFTCAP, PRECISION,
        )  # fmt: skip
    peak, total, acc = _attend_levels(
        peak, total, acc, q, first, keys, k_scale, k_low, values, v_scale, v_low,
        stride_kn, stride_kc, stride_vn, full, tail, scale, softcap,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, CHUNK, HALF, False, SOFTCAP, PRECISION,
    )  # fmt: skip
    peak, total, acc = _attend_levels(
        peak, total, acc, q, first, keys, k_scale, k_low, values, v_scale, v_low,
        stride_kn, stride_kc, stride_vn, tail, high, scale, softcap,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, CHUNK, HALF, True, SOFTCAP, PRECISION,
    )  # fmt: skip
    out, lse = finish(peak, total, acc)
    row = (part * tl.num_programs(1) + head) * rows + m
    tl.store(out_ptr + row[:, None] * DV + dv[None, :], out, mask=real[:, None] & (dv[None, :] < DV))
    tl.store(lse_ptr + row, lse, mask=real)


def quantised_parts(
    q: Tensor,
    kv: QuantisedKV,
    *,
    scale: float,
    softcap: float | None = None,
    first: Tensor | None = None,
    begin: int = 0,
    blocks: Blocks | None = None,
) -> Attended:
    """Like `prefix_parts`, over KV that stays int8. `chunk_tokens` is a multiple of 16."""
    heads, rows, head_dim = q.shape
    num_keys, v_dim = kv.v.shape[1:]
    q = rows_apart(q)
    half = q.dtype != torch.float32
    blocks = blocks or pick_int8_blocks(rows, head_dim, v_dim, q.dtype, kv.chunk_tokens)
    assert kv.chunk_tokens % blocks.keys == 0
    begin = begin // blocks.keys * blocks.keys
    row_blocks = triton.cdiv(rows, blocks.rows)
    split = split_keys(num_keys - begin, row_blocks * heads, blocks, q.device)
    out = torch.empty((split.parts, heads, rows, v_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((split.parts, heads, rows), dtype=torch.float32, device=q.device)
    _quantised_kernel[row_blocks, heads, split.parts](
        q, kv.k, kv.k_scale, kv.k_low, kv.v, kv.v_scale, kv.v_low, first, out, lse,
        rows, begin, num_keys, split.keys, scale, softcap or 0.0,
        q.stride(0), q.stride(1), kv.k.stride(0), kv.k.stride(1), kv.k_scale.stride(0), kv.k_scale.stride(1),
        kv.v.stride(0), kv.v.stride(1), kv.v_scale.stride(0),
        D=head_dim, DV=v_dim, BLOCK_D=power_of_two(head_dim), BLOCK_DV=power_of_two(v_dim),
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, CHUNK=kv.chunk_tokens,
        HALF=half, SOFTCAP=softcap is not None,
        PRECISION=pick_precision(q), num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    return Attended(out, lse)


def quantised_prefix(
    q: Tensor,
    kv: QuantisedKV,
    *,
    scale: float,
    softcap: float | None = None,
    first: Tensor | None = None,
    begin: int = 0,
) -> Attended:
    """Like `shared_prefix`, over KV that stays int8."""
    return merged(quantised_parts(q, kv, scale=scale, softcap=softcap, first=first, begin=begin))
