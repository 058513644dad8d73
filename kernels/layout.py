"""What each layer of a model keeps of a document: every token, the last ones of a window, or a state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class TokenShape(NamedTuple):
    """Keys [kv_heads, tokens, k_dim] and values [kv_heads, tokens, v_dim] of one layer."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype


class StateShape(NamedTuple):
    """One tensor of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class KVLayout:
    """`tokens` has every attention layer, `windows` those that see only so many tokens back (their own counted).

    `latent` layers (MLA) keep one compressed vector as keys and one rotated part as values, for all heads together.
    `recurrent` names the states of linear-attention, Mamba and convolution layers, without a dimension for rows.
    """

    tokens: Mapping[int, TokenShape] = field(default_factory=dict)
    windows: Mapping[int, int] = field(default_factory=dict)
    latent: frozenset[int] = frozenset()
    recurrent: Mapping[str, StateShape] = field(default_factory=dict)

    @property
    def token_layers(self) -> tuple[int, ...]:
        """The layers that are stored token by token."""
        return tuple(sorted(self.tokens.keys() - self.windows.keys()))

    def state_shapes(self, length: int) -> dict[str, StateShape]:
        """Everything else, as it is behind `length` tokens."""
        shapes = {}
        for layer, width in self.windows.items():
            heads, k_dim, v_dim, dtype = self.tokens[layer]
            held = min(length, width - 1)
            shapes[f"window.{layer}.k"] = StateShape((heads, held, k_dim), dtype)
            shapes[f"window.{layer}.v"] = StateShape((heads, held, v_dim), dtype)
        return shapes | {f"recurrent.{name}": shape for name, shape in self.recurrent.items()}


PLAIN = KVLayout()  # nothing is known: every layer that is written keeps every token
