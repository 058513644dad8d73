"""The memory of a document, shared by all its questions, and a small one for each question."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import ChunkMismatch
from kernels.layout import PLAIN, KVLayout, LayerShape
from kernels.memo import Memo
from kernels.recurrent import RecurrentState
from kernels.window import WindowKV


class LayerKV(NamedTuple):
    """What attention reads of a layer: keys and values [kv_heads, tokens, dim] from token `base` of the text on."""

    keys: Tensor
    values: Tensor
    base: int


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

    @property
    def are_all_here(self) -> bool:
        return not any(self._missing.values())

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
    """What a model keeps of one document, for `capacity` tokens, of which `length` are filled.

    `keys[layer]` and `values[layer]` are [kv_heads, capacity, head_dim] on the device, made when a layer is first
    written; only the layers that keep every token have them. Prefill owns and fills it; afterwards it is read-only and
    shared by every question. While it is being loaded, `layer` waits for what has not come yet. Made by
    `LanguageModel.new_kv`, which knows the layout.
    """

    capacity: int
    length: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    layout: KVLayout = PLAIN
    recurrent: RecurrentState = field(default_factory=RecurrentState)
    windows: dict[int, WindowKV] = field(default_factory=dict)
    arrivals: Arrivals | None = None
    memo: Memo = field(default_factory=Memo)  # of what holds until something is written

    @classmethod
    def empty(
        cls,
        capacity: int,
        shapes: Mapping[int, LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout: KVLayout = PLAIN,
    ) -> "PrefixKV":
        """Room for `capacity` tokens in each of these layers."""
        kv = cls(capacity, layout=layout)
        for layer, shape in shapes.items():
            keys = (shape.kv_heads, capacity, shape.key_dim)
            values = (shape.kv_heads, capacity, shape.value_dim)
            kv.keys[layer] = torch.empty(keys, dtype=dtype, device=device)
            kv.values[layer] = torch.empty(values, dtype=dtype, device=device)
        return kv

    @property
    def token_layers(self) -> tuple[int, ...]:
        """The layers that are stored token by token, in chunks; everything else is in `state`."""
        return self.layout.token_layers if self.layout.tokens or self.layout.recurrent else tuple(sorted(self.keys))

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def size_bytes(self) -> int:
        tokens = sum(t.numel() * t.element_size() for part in (self.keys, self.values) for t in part.values())
        return tokens + sum(window.size_bytes for window in self.windows.values()) + self.recurrent.size_bytes

    @property
    def is_here(self) -> bool:
        """Nothing is being loaded any more."""
        return self.arrivals is None or self.arrivals.are_all_here

    def layer(self, layer: int) -> LayerKV:
        """The one way to a layer's keys and values, once they are there.

        Raises:
            ChunkMismatch: the layer was never filled.
        """
        if layer in self.windows:
            window = self.windows[layer]
            return LayerKV(window.keys, window.values, window.base)
        if layer not in self.keys:
            raise ChunkMismatch(f"nothing is stored of layer {layer}")
        if self.arrivals is not None:
            self.arrivals.wait(layer)
        keys, values = self.keys[layer], self.values[layer]
        if layer not in self.layout.latent:
            return LayerKV(keys, values, 0)
        joined = self.memo.remember(("joined", layer), lambda: torch.cat([keys, values], -1))
        return LayerKV(joined, keys, 0)  # both side by side are the keys

    @torch.inference_mode()
    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Stores k and v [kv_heads, tokens, head_dim] at token `start` of `layer`."""
        self.memo.forget()
        if layer in self.windows:
            self.windows[layer].write(start, k, v)
            return
        if layer in self.layout.windows:
            assert start == 0, "the window's tokens before it are missing"
            self.windows[layer] = WindowKV(self.layout.windows[layer], 0, k.clone(), v.clone())
            return
        if layer not in self.keys:
            self.keys[layer] = k.new_empty((k.shape[0], self.capacity, k.shape[2]))
            self.values[layer] = v.new_empty((v.shape[0], self.capacity, v.shape[2]))
        stop = start + k.shape[1]
        self.keys[layer][:, start:stop] = k
        self.values[layer][:, start:stop] = v

    @torch.inference_mode()
    def state(self) -> dict[str, Tensor]:
        """Copies of everything that is not stored token by token, as it is behind `length` tokens.

        `window.<layer>.k` and `.v` are [kv_heads, tokens, head_dim]; `recurrent.<layer>.conv` and `.ssm` are what the
        model makes them. Empty for a model whose layers all keep every token.
        """
        parts = {}
        for layer, window in self.windows.items():
            keys, values, _ = window.before(self.length)
            parts[f"window.{layer}.k"] = keys.clone(memory_format=torch.contiguous_format)
            parts[f"window.{layer}.v"] = values.clone(memory_format=torch.contiguous_format)
        for name, tensor in self.recurrent.tensors.items():
            parts[f"recurrent.{name}"] = tensor[0].clone(memory_format=torch.contiguous_format)
        return parts

    @torch.inference_mode()
    def set_state(self, length: int, tensors: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave behind `length` tokens, and nothing if it does not fit; `length` is then this one.

        Raises:
            ChunkMismatch: names, shapes or dtypes are not those of this model.
        """
        shapes = self.layout.state_shapes(length)
        if tensors.keys() != shapes.keys():
            odd = sorted(tensors.keys() ^ shapes.keys())
            raise ChunkMismatch(f"its state has other parts, {odd[0]} among them")
        for name, (shape, dtype) in shapes.items():
            tensor = tensors[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ChunkMismatch(f"{name} holds {tuple(tensor.shape)} {tensor.dtype}, not {shape} {dtype}")
        self.memo.forget()
        self.windows = {
            layer: WindowKV(
                width,
                length - min(length, width - 1),
                tensors[f"window.{layer}.k"].clone(),
                tensors[f"window.{layer}.v"].clone(),
            )
            for layer, width in self.layout.windows.items()
        }
        self.recurrent = RecurrentState(
            {name: tensors[f"recurrent.{name}"][None].clone() for name in self.layout.recurrent}
        )
        self.length = length


@dataclass
class SuffixKV:
    """The KV of what follows the document: `slots` questions with room for `capacity` tokens each.

    `keys[layer]` is [slots, kv_heads, capacity, head_dim]. A slot's filled length is the decoder's to know.
    """

    slots: int
    capacity: int
    layout: KVLayout = PLAIN
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    recurrent: RecurrentState = field(default_factory=RecurrentState)
    memo: Memo = field(default_factory=Memo)  # of what holds as long as there is room
    _joined: dict[int, Tensor] = field(default_factory=dict)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, kv_heads, capacity, dim] as attention reads them."""
        if layer in self._joined:
            return self._joined[layer], self.keys[layer]
        return self.keys[layer], self.values[layer]

    @torch.inference_mode()
    def provide(self, layer: int, like: Tensor, shape: LayerShape) -> None:
        """Makes the room of a layer, if it is not there."""
        if layer not in self.keys:
            self._make(layer, like, *shape)

    @torch.inference_mode()
    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v [kv_heads, tokens, head_dim]; token i goes to slots[i], positions[i]."""
        self.provide(layer, k, LayerShape(k.shape[0], k.shape[2], v.shape[2]))
        self.keys[layer][slots, :, positions] = k.transpose(0, 1)
        self.values[layer][slots, :, positions] = v.transpose(0, 1)

    def _make(self, layer: int, like: Tensor, heads: int, k_dim: int, v_dim: int) -> None:
        self.memo.forget()
        room = (self.slots, heads, self.capacity)
        if layer in self.layout.latent:
            joined = self._joined[layer] = like.new_zeros((*room, k_dim + v_dim))
            self.keys[layer], self.values[layer] = joined[..., :k_dim], joined[..., k_dim:]
        else:
            self.keys[layer], self.values[layer] = like.new_zeros((*room, k_dim)), like.new_zeros((*room, v_dim))

    @torch.inference_mode()
    def begin(self, slot: int, prefix: PrefixKV) -> None:
        """Gives a slot its own copy of the document's recurrent state."""
        self.recurrent.put(slot, prefix.recurrent, 0, rows=self.slots)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one slot over another."""
        for part in (self.keys, self.values):
            for tensor in part.values():
                tensor[target, :, :length] = tensor[source, :, :length]
        self.recurrent.put(target, self.recurrent, source, rows=self.slots)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zeroes a slot. Needed after NaN only: a weight of zero hides any other number, but 0 x NaN is NaN."""
        for part in (self.keys, self.values):
            for tensor in part.values():
                tensor[slot] = 0

    @torch.inference_mode()
    def grow(self, slots: int, capacity: int) -> None:
        """Makes room for so many slots of so many tokens, if there is less, keeping what is stored. Slots come in
        powers of two, so that one more question seldom moves the others."""
        held_slots, held = self.slots, self.capacity
        if slots <= held_slots and capacity <= held:
            return
        self.slots = max(held_slots, 1 << (slots - 1).bit_length())
        self.capacity = max(held, capacity)
        for layer in self.keys:
            keys, values = self.keys[layer], self.values[layer]
            self._make(layer, keys, keys.shape[1], keys.shape[3], values.shape[3])
            self.keys[layer][:held_slots, :, :held] = keys
            self.values[layer][:held_slots, :, :held] = values
        if self.slots > held_slots:
            self.recurrent.grow(self.slots)

    @property
    def size_bytes(self) -> int:
        tokens = sum(t.numel() * t.element_size() for part in (self.keys, self.values) for t in part.values())
        return tokens + self.recurrent.size_bytes


def to_index(values: list[int], device: torch.device) -> Tensor:
    """A list of positions as an int64 tensor on the device."""
    return torch.tensor(values, dtype=torch.int64).to(device)
