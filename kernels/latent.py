"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over what it caches: one compressed vector for all heads.

A head's keys and values are linear in that vector, so the key map is applied to the query and the value map to what
was attended to. The keys are then the compressed vector and the rotated part, the values the compressed vector alone,
and all heads share them. The maps are asked of the module's own `expand_kv`, whose weights may be kept in any way.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class Maps(NamedTuple):
    """`key` [heads, head_dim, rank + rope_dim] and `value` [heads, rank, v_dim]."""

    key: Tensor
    value: Tensor


_known: WeakKeyDictionary[nn.Module, Maps] = WeakKeyDictionary()


def is_latent(module: nn.Module) -> bool:
    return hasattr(module, "expand_kv") and hasattr(module, "kv_lora_rank")


def latent_layers(model: nn.Module) -> frozenset[int]:
    return frozenset(int(module.layer_idx) for module in model.modules() if is_latent(module))  # type: ignore[arg-type]


def absorb(module: nn.Module, query: Tensor) -> Tensor:
    """[heads, tokens, head_dim] -> [heads, tokens, rank + rope_dim], to be matched with what is cached."""
    return torch.bmm(query, _maps(module, query).key)


def expand(module: nn.Module, attended: Tensor) -> Tensor:
    """[tokens, heads, rank] -> [tokens, heads, v_dim]."""
    return torch.bmm(attended.transpose(0, 1), _maps(module, attended).value).transpose(0, 1)


def _maps(module: nn.Module, like: Tensor) -> Maps:
    maps = _known.get(module)
    if maps is None or maps.key.dtype != like.dtype or maps.key.device != like.device:
        rank, rope = int(module.kv_lora_rank), int(module.qk_rope_head_dim)  # type: ignore[arg-type]
        units = torch.eye(rank + rope, dtype=like.dtype, device=like.device)[None, None]
        keys, values = module.expand_kv(units[..., :rank], units[..., rank:])  # type: ignore[operator]
        maps = _known[module] = Maps(keys[0].transpose(1, 2).contiguous(), values[0, :, :rank].contiguous())
    return maps
