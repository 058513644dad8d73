"""Attention in float64, and how far rounding may take an implementation from it."""

import torch
from torch import Tensor


def naive(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention [tokens, query_heads, v_dim] and its lse [query_heads, tokens] in float64, one softmax over all keys.

    q is [query_heads, tokens, head_dim], k and v [kv_heads, keys, dim], `seen` [tokens, keys].
    """
    group = q.shape[0] // k.shape[0]
    k, v = (part.double().repeat_interleave(group, 0) for part in (k, v))
    scores = q.double() @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def rounding_bound(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> float:
    """The largest error of a number of the result that rounding explains, with sums in fp32.

    A score is off by at most d units of fp32 of the sum of its products' sizes, and, in a narrower type, by one unit of
    that type of the score; a weight by one unit more. Weights that are off by e move the mean of the values by at most
    2 e of the largest value. Sums over n keys are counted with sqrt(n) units: their roundings have either sign.
    """
    group = q.shape[0] // k.shape[0]
    sizes = float((q.double().abs() @ k.double().abs().repeat_interleave(group, 0).transpose(1, 2)).max()) * scale
    single, own = torch.finfo(torch.float32).eps, torch.finfo(q.dtype).eps
    narrow = own if own > single else 0.0
    score = (q.shape[2] * single + narrow) * sizes
    weight = score + narrow + 4 * single * k.shape[1] ** 0.5
    return max(1.0, float(v.double().abs().max())) * (2 * weight + 2 * own)
