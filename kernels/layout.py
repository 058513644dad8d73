"""What each layer of a model keeps of a document: every token, the last ones of a window, or a state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class LayerShape(NamedTuple):
    """What one token takes in a layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


class StateShape(NamedTuple):
    """One tensor of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class KVLayout:
    """`tokens` has every attention layer, all in one `dtype`; `windows` those that see only so many tokens back, their
    own counted.

    `latent` layers (MLA) keep one compressed vector as keys and one rotated part as values, for all heads together.
    `recurrent` names the states of linear-attention, Mamba and convolution layers, without a dimension for rows.
    """

    tokens: Mapping[int, LayerShape] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    windows: Mapping[int, int] = field(default_factory=dict)
    latent: frozenset[int] = frozenset()
    recurrent: Mapping[str, StateShape] = field(default_factory=dict)

    @property
    def token_layers(self) -> tuple[int, ...]:
        """The layers that are stored token by token."""
        return tuple(sorted(self.tokens.keys() - self.windows.keys()))

    def token_bytes(self, layer: int) -> int:
        """What one token takes in an attention layer, as it is stored."""
        kv_heads, key_dim, value_dim = self.tokens[layer]
        return kv_heads * (key_dim + value_dim) * self.dtype.itemsize

    @property
    def has_state(self) -> bool:
        """Something is not stored token by token, so that a prefill goes on only where a state is stored."""
        return bool(self.windows or self.recurrent)

    def state_shapes(self, length: int) -> dict[str, StateShape]:
        """Everything else, as it is behind `length` tokens."""
        shapes = {}
        for layer, width in self.windows.items():
            heads, key_dim, value_dim = self.tokens[layer]
            held = min(length, width - 1)
            shapes[f"window.{layer}.k"] = StateShape((heads, held, key_dim), self.dtype)
            shapes[f"window.{layer}.v"] = StateShape((heads, held, value_dim), self.dtype)
        return shapes | {f"recurrent.{name}": shape for name, shape in self.recurrent.items()}


PLAIN = KVLayout()  # nothing is known: every layer that is written keeps every token
