"""Preallocated KV: one for a document, shared by all its questions, and one small one per question."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class LayerShape(NamedTuple):
    """What one token takes in a layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


class LayerKV(NamedTuple):
    """`keys` [kv_heads, capacity, key_dim] and `values` [kv_heads, capacity, value_dim]."""

    keys: Tensor
    values: Tensor


class Arrivals:
    """Which layers are whole, of a KV that another thread is loading chunk by chunk."""

    def __init__(self, layers: Iterable[int], num_chunks: int) -> None:
        self._missing = dict.fromkeys(layers, num_chunks)
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def note(self, layers: Iterable[int]) -> None:
        """One more chunk of each of these layers has come."""
        with self._changed:
            for layer in layers:
                self._missing[layer] -= 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more will come: whoever waits gets the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Returns once the layer is whole."""
        if self._missing[layer] == 0:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._missing[layer] == 0 or self._error is not None)
            if self._missing[layer] and self._error is not None:
                raise self._error


@dataclass
class PrefixKV:
    """The KV of one document, for `capacity` tokens, of which `length` are filled.

    `keys[layer]` and `values[layer]` are [kv_heads, capacity, head_dim] on the device, made when a layer is first
    written. Prefill owns and fills it; afterwards it is read-only and shared by every question. While it is being
    loaded, `layer` waits for what has not come yet.
    """

    capacity: int
    length: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    arrivals: Arrivals | None = None

    @classmethod
    def empty(
        cls, capacity: int, shapes: Mapping[int, LayerShape], *, dtype: torch.dtype, device: torch.device
    ) -> "PrefixKV":
        """Room for `capacity` tokens in every layer."""
        kv = cls(capacity)
        for layer, shape in shapes.items():
            keys = (shape.kv_heads, capacity, shape.key_dim)
            values = (shape.kv_heads, capacity, shape.value_dim)
            kv.keys[layer] = torch.empty(keys, dtype=dtype, device=device)
            kv.values[layer] = torch.empty(values, dtype=dtype, device=device)
        return kv

    def layer(self, layer: int) -> LayerKV:
        """A layer's KV, once it is there."""
        if self.arrivals is not None:
            self.arrivals.wait(layer)
        return LayerKV(self.keys[layer], self.values[layer])

    @property
    def shapes(self) -> dict[int, LayerShape]:
        return {
            layer: LayerShape(keys.shape[0], keys.shape[2], self.values[layer].shape[2])
            for layer, keys in self.keys.items()
        }

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for part in (self.keys, self.values) for t in part.values())

    @torch.inference_mode()
    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Stores k and v [kv_heads, tokens, head_dim] at token `start` of `layer`."""
        if layer not in self.keys:
            self.keys[layer] = k.new_empty((k.shape[0], self.capacity, k.shape[2]))
            self.values[layer] = v.new_empty((v.shape[0], self.capacity, v.shape[2]))
        stop = start + k.shape[1]
        self.keys[layer][:, start:stop] = k
        self.values[layer][:, start:stop] = v


@dataclass
class SuffixKV:
    """The KV of what follows the document: `slots` questions with room for `capacity` tokens each.

    `keys[layer]` is [slots, kv_heads, capacity, head_dim]. A slot's filled length is the decoder's to know.
    """

    slots: int
    capacity: int
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v [kv_heads, tokens, head_dim]; token i goes to slots[i], positions[i]."""
        if layer not in self.keys:
            self.keys[layer] = k.new_zeros((self.slots, k.shape[0], self.capacity, k.shape[2]))
            self.values[layer] = v.new_zeros((self.slots, v.shape[0], self.capacity, v.shape[2]))
        self.keys[layer][slots, :, positions] = k.transpose(0, 1)
        self.values[layer][slots, :, positions] = v.transpose(0, 1)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one slot over another."""
        for part in (self.keys, self.values):
            for tensor in part.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zeroes a slot. Needed after NaN only: a weight of zero hides any other number, but 0 x NaN is NaN."""
        for part in (self.keys, self.values):
            for tensor in part.values():
                tensor[slot] = 0

    @torch.inference_mode()
    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` tokens per slot, keeping what is stored."""
        for part in (self.keys, self.values):
            for layer, old in part.items():
                new = old.new_zeros((self.slots, old.shape[1], capacity, old.shape[3]))
                new[:, :, : self.capacity] = old
                part[layer] = new
        self.capacity = capacity

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for part in (self.keys, self.values) for t in part.values())


def to_index(values: list[int], device: torch.device) -> Tensor:
    """A list of positions as an int64 tensor on the device."""
    return torch.tensor(values, dtype=torch.int64).to(device)
