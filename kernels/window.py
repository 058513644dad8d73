"""The KV of a sliding-window layer: the tokens that a later one can still see."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class WindowKV:
    """Tokens [base, stop) of one layer, where a token sees `width` tokens, itself the last of them.

    `keys` and `values` are [kv_heads, stop - base, head_dim]. While a document is read they hold the chunk just
    written and the width - 1 tokens before it.
    """

    width: int
    base: int
    keys: Tensor
    values: Tensor

    @property
    def stop(self) -> int:
        return self.base + self.keys.shape[1]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.keys, self.values))

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Goes on at token `start`; what no token from there on can see is dropped."""
        keys, values, base = self.before(start)
        self.keys, self.values, self.base = torch.cat([keys, k], 1), torch.cat([values, v], 1), base

    def before(self, position: int) -> tuple[Tensor, Tensor, int]:
        """Keys and values that the token at `position` sees without its own, and the first one's place."""
        first = max(position - self.width + 1, 0)
        assert self.base <= first and position <= self.stop, "the window has moved on"
        held = slice(first - self.base, position - self.base)
        return self.keys[:, held], self.values[:, held], first
