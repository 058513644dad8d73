"""Which keys the tokens of one step see, independent of the layer. What a backend derives from it is kept here too."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.memo import Memo

EVERYTHING = 1 << 40  # a window wider than any document


class Rows(Memo):
    """Lives for one step; what is remembered is made once, for all layers that need the same."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device


class PrefillRows(Rows):
    """The last `tokens` tokens of a document so far."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        super().__init__(device)
        self.tokens = tokens

    def stop(self, num_keys: int, group: int) -> Tensor:
        """Where each row stops to see, int64 [rows] on the CPU, when the document holds `num_keys` keys."""
        return torch.arange(num_keys - self.tokens + 1, num_keys + 1).repeat_interleave(group)


class DecodeRows(Rows):
    """`counts[i]` new tokens of slot i, packed slot by slot, each behind the `lengths[i]` stored ones."""

    def __init__(self, counts: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(device)
        self.counts = list(counts)
        self.lengths = list(lengths)
        self.slots = [slot for slot, count in enumerate(counts) for _ in range(count)]
        self.offsets = [offset for count in counts for offset in range(count)]
        self.local = torch.tensor([lengths[s] + o for s, o in zip(self.slots, self.offsets, strict=True)])

    def first(self, num_keys: int, window: int, group: int) -> Tensor:
        """The first key each row sees of `num_keys` shared ones, int64 [rows] on the CPU; may lie before or behind."""
        return (self.local + num_keys - window + 1).repeat_interleave(group)
