"""Exact attention over ranges of keys, in blocks, with the log-sum-exp kept so that parts can be merged.

The running softmax is Milakov and Gimelshein's online normaliser (arXiv:1805.02867); splitting the keys and
merging the parts by their log-sum-exp is FlashAttention's and Flash-Decoding's method (arXiv:2205.14135,
arXiv:2307.08691); one pass over a prefix shared by many queries is Hydragen's (arXiv:2402.05099).
This is plain torch and runs on every device; it is also the reference for faster kernels.

Query heads that share a KV head are folded into rows: row r of a fold is token r // group, head r % group.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROW_BLOCK = 768
SCORES_PER_BLOCK = ROW_BLOCK * 512  # of one head; fp32 scores of this size stay in a core's cache


class Attended(NamedTuple):
    """A part of an attention: `out` [heads, rows, head_dim] and `lse` [heads, rows], both fp32 (or fp64).

    A row that saw no key has out = 0 and lse = -inf.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Block:
    """Rows times keys that are computed in one matmul; `hidden` marks the pairs that must not see each other."""

    rows: slice
    keys: slice
    hidden: Tensor | None


def plan_blocks(first: Tensor, stop: Tensor, *, device: torch.device) -> list[Block]:
    """Cuts the visible part of (rows x keys) into blocks; invisible blocks are left out.

    Row r sees the keys first[r] <= key < stop[r]. `first` and `stop` are CPU integer tensors, [rows] where all
    heads agree, or [heads, rows].
    """
    blocks = []
    for row in range(0, first.shape[-1], ROW_BLOCK):
        rows = slice(row, min(row + ROW_BLOCK, first.shape[-1]))
        low, high = first[..., rows], stop[..., rows]
        begin, end = max(int(low.min()), 0), int(high.max())
        step = SCORES_PER_BLOCK // (rows.stop - rows.start)
        for key in range(begin, end, step):
            keys = slice(key, min(key + step, end))
            if int(low.max()) <= keys.start and int(high.min()) >= keys.stop:
                blocks.append(Block(rows, keys, None))
                continue
            positions = torch.arange(keys.start, keys.stop)
            visible = (positions >= low[..., None]) & (positions < high[..., None])
            if bool(visible.any()):
                blocks.append(Block(rows, keys, (~visible).to(device)))
    return blocks


def attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], *, scale: float, softcap: float | None = None
) -> Attended:
    """Attention of q [heads, rows, head_dim] over k [heads, keys, head_dim] and v [heads, keys, v_dim]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, rows, _ = q.shape
    out = q.new_zeros((heads, rows, v.shape[-1]), dtype=wide)
    peak = q.new_full((heads, rows), float("-inf"), dtype=wide)
    total = q.new_zeros((heads, rows), dtype=wide)
    for block in blocks:
        scores = torch.bmm(q[:, block.rows], k[:, block.keys].transpose(1, 2)).to(wide).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if block.hidden is not None:
            scores.masked_fill_(block.hidden, float("-inf"))
        old = peak[:, block.rows]
        new = torch.maximum(old, scores.amax(-1))
        # A row that has seen no key yet has a peak of -inf; it is shifted by 0 so that nothing becomes NaN.
        shift = new.masked_fill(new == float("-inf"), 0.0)
        weights = scores.sub_(shift[..., None]).exp_()
        decay = torch.exp(old - shift)
        total[:, block.rows] = total[:, block.rows] * decay + weights.sum(-1)
        values = torch.bmm(weights.to(v.dtype), v[:, block.keys]).to(wide)
        out[:, block.rows] = out[:, block.rows] * decay[..., None] + values
        peak[:, block.rows] = new
    lse = peak + torch.log(total)
    return Attended(out / total.clamp_min(torch.finfo(wide).tiny)[..., None], lse)


def merge(a: Attended, b: Attended) -> Attended:
    """The attention over the keys of both parts together."""
    lse = torch.logaddexp(a.lse, b.lse)
    shift = lse.masked_fill(lse == float("-inf"), 0.0)
    out = a.out * torch.exp(a.lse - shift)[..., None] + b.out * torch.exp(b.lse - shift)[..., None]
    return Attended(out, lse)


def with_sinks(part: Attended, sinks: Tensor, tokens: int) -> Attended:
    """The folded attention of so many tokens with one more key for each query head, whose value is zero and whose
    scores are `sinks` [query_heads]."""
    kv_heads = part.lse.shape[0]
    lse = sinks.to(part.lse.dtype).view(kv_heads, 1, -1).expand(-1, tokens, -1).reshape(kv_heads, -1)
    return merge(part, Attended(torch.zeros_like(part.out), lse))


def fold(q: Tensor, kv_heads: int) -> Tensor:
    """[query_heads, tokens, head_dim] -> [kv_heads, tokens * group, head_dim], rows ordered by token."""
    heads, tokens, head_dim = q.shape
    return q.view(kv_heads, heads // kv_heads, tokens, head_dim).transpose(1, 2).reshape(kv_heads, -1, head_dim)


def unfold(out: Tensor, tokens: int) -> Tensor:
    """[kv_heads, tokens * group, head_dim] -> [tokens, query_heads, head_dim], the inverse of fold."""
    kv_heads, _, head_dim = out.shape
    return out.view(kv_heads, tokens, -1, head_dim).permute(1, 0, 2, 3).reshape(tokens, -1, head_dim)
