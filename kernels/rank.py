"""One process's share of a model on several cards, and how heads pass between the processes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.kv import PrefixKV, SuffixKV
from kernels.model import Asked, LanguageModel
from kernels.steps import PrefillStep, ReplayStep
from kernels.window import WindowKV


@dataclass
class WholeKV(PrefixKV):
    """A document's KV with the heads of all ranks, in the host's memory of rank 0.

    Of the first `spread` tokens, each rank has its own heads. `key` is the ranks' name for it.
    """

    key: int = -1
    spread: int = 0
    spread_windows: Mapping[int, WindowKV] | None = None

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        super().write(layer, start, k, v)
        self.spread = min(self.spread, start)


class Rank:
    """One process's share. Each public method is an order that all ranks obey at the same time."""

    def __init__(self, model: LanguageModel, number: int, count: int) -> None:
        self.model = model
        self.number = number
        self.count = count
        self.whole: Callable[[int], WholeKV] | None = None  # rank 0's
        self._prefixes: dict[int, PrefixKV] = {}
        self._suffixes: dict[int, SuffixKV] = {}

    def new_prefix(self, prefix: int, capacity: int) -> None:
        self._prefixes[prefix] = self.model.new_kv(capacity)

    def new_suffix(self, suffix: int, slots: int, capacity: int) -> None:
        self._suffixes[suffix] = self.model.new_suffix(slots, capacity)

    def drop(self, keys: list[int]) -> None:
        for key in keys:
            self._prefixes.pop(key, None)
            self._suffixes.pop(key, None)

    def move(self, suffix: int, source: int, target: int, length: int) -> None:
        self._suffixes[suffix].move(source, target, length)

    def clear(self, suffix: int, slot: int) -> None:
        self._suffixes[suffix].clear(slot)

    def grow(self, suffix: int, slots: int, capacity: int) -> None:
        self._suffixes[suffix].grow(slots, capacity)

    def prefill(self, prefix: int, start: int, ids: list[int], keep: int) -> Tensor:
        return self.model.forward(PrefillStep(self._prefixes[prefix], start, len(ids)), ids, keep)

    def replay(self, prefix: int, start: int, ids: list[int], keep: int) -> Tensor:
        return self.model.forward(ReplayStep(self._prefixes[prefix], start, len(ids)), ids, keep)

    def ask_all(self, documents: list[dict[str, Any]], *, every: bool) -> Tensor:
        asked = []
        for each in documents:
            kv = self._prefixes[each["prefix"]]
            kv.length = each["length"]
            asked.append(Asked(kv, self._suffixes[each["suffix"]], each["pending"], each["lengths"]))
        return self.model.ask_all(asked, every=every)

    def collect(self, prefix: int, start: int, stop: int) -> None:
        """Brings what all ranks computed of the tokens [start, stop) to rank 0, windows as they are behind them."""
        kv = self._prefixes[prefix]
        parts = [held[layer][:, start:stop] for layer in kv.token_layers for held in (kv.keys, kv.values)]
        parts += [part for window in kv.windows.values() for part in (window.keys, window.values)]
        flat = _flatten(parts)
        received = [torch.empty_like(flat) for _ in range(self.count)] if self.number == 0 else None
        dist.gather(flat, received, dst=0)
        if received is None or self.whole is None:
            return
        whole, ranks = self.whole(prefix), [_unflatten(each, parts) for each in received]
        together = iter([torch.cat(same) for same in zip(*ranks, strict=True)])
        for layer in kv.token_layers:
            for held in (whole.keys, whole.values):
                held[layer][:, start:stop] = _once(next(together), held[layer].shape[0])
        whole.windows = whole.spread_windows = {
            layer: WindowKV(
                window.width,
                window.base,
                _once(next(together), whole.layout.tokens[layer].kv_heads),
                _once(next(together), whole.layout.tokens[layer].kv_heads),
            )
            for layer, window in kv.windows.items()
        }

    @torch.inference_mode()
    def spread(self, prefix: int, layer: int, start: int, stop: int) -> None:
        """Gives each rank its heads of the tokens [start, stop) of a layer."""
        kv = self._prefixes[prefix]
        for held in (kv.keys, kv.values):
            source = None
            if self.whole is not None:
                whole = self.whole(prefix)
                part = (whole.keys if held is kv.keys else whole.values)[layer][:, start:stop]
                source = self._shares(part, held[layer].shape[0])
            held[layer][:, start:stop] = self._receive(held[layer][:, start:stop], source)

    @torch.inference_mode()
    def spread_state(self, prefix: int, length: int) -> None:
        """Gives each rank its heads of the windows behind so many tokens."""
        kv = self._prefixes[prefix]
        state = self.whole(prefix).state() if self.whole is not None else {}
        tensors = {}
        for name, (shape, dtype) in self.model.layout.state_shapes(length).items():
            source = self._shares(state[name], shape[0]) if state else None
            tensors[name] = self._receive(torch.empty(shape, dtype=dtype), source).to(self.model.device)
        kv.set_state(length, tensors)

    def _shares(self, whole: Tensor, heads: int) -> list[Tensor]:
        """What each rank has of the heads of all: so many of its own, or every rank all of them."""
        return list(torch.split(whole, heads)) if whole.shape[0] > heads else [whole] * self.count

    def _receive(self, like: Tensor, source: list[Tensor] | None) -> Tensor:
        flat = torch.empty(like.numel() * like.element_size(), dtype=torch.uint8)
        dist.scatter(flat, None if source is None else [_flatten([part]) for part in source], src=0)
        return _unflatten(flat, [like])[0]


def _flatten(parts: Iterable[Tensor]) -> Tensor:
    """All bytes, one after the other, on the CPU."""
    return torch.cat([part.detach().to("cpu").contiguous().view(-1).view(torch.uint8) for part in parts])


def _unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [part.numel() * part.element_size() for part in like]
    pieces = zip(torch.split(flat, sizes), like, strict=True)
    return [piece.clone().view(part.dtype).view(part.shape) for piece, part in pieces]


def _once(together: Tensor, heads: int) -> Tensor:
    """Of the heads of all ranks, each once: where every rank has all of them, the first rank's."""
    return together[:heads]
