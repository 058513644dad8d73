"""Takes the chunks of a snapshot into a PrefixKV, part by part, as they arrive from the store."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.codecs.base import Raw
from kernels.codecs.chunk import byte_views, decode_layer, group_parts, read_raws
from kernels.codecs.layout import Described, Placed, lay_out, layer_of, names_within, read_layout
from kernels.codecs.none import Plain
from kernels.errors import ChunkMismatch
from kernels.kv import Arrivals, PrefixKV


class KVReceiver:
    """For each part: `views` gives the memory to fill; `accept`, once its bytes are proved, makes KV of them.

    `spans` are the tokens [start, stop) of the chunks. `kv` has room in every layer; its `arrivals` tell when one is
    whole. With the codec `none` on the CPU, the views are the KV's own memory. Safe to use from several threads.
    """

    def __init__(self, kv: PrefixKV, spans: Sequence[tuple[int, int]], *, codec: str) -> None:
        kv.arrivals = self.arrivals = Arrivals(kv.keys, len(spans))
        on_cpu = all(keys.device.type == "cpu" for keys in kv.keys.values())
        self.in_place = on_cpu and (codec == Plain.name or not kv.keys)
        kind = _InPlace if self.in_place else _Decoding
        self._chunks = [kind(kv, start, stop, codec) for start, stop in spans]

    def views(self, chunk: int, start: int, stop: int) -> Sequence[memoryview]:
        """
        Raises:
            ChunkMismatch: the part does not begin and end where a part does.
        """
        return self._chunks[chunk].views(start, stop)

    def accept(self, chunk: int, start: int, stop: int) -> None:
        """
        Raises:
            ChunkMismatch: the bytes are not a chunk of this KV.
        """
        self.arrivals.note(self._chunks[chunk].accept(start, stop))


class _InPlace:
    """The chunk can only look as this KV would be encoded, so its header is compared and never read."""

    def __init__(self, kv: PrefixKV, start: int, stop: int, codec: str) -> None:
        self._tensors: dict[str, Tensor] = {}
        for layer in sorted(kv.keys):
            self._tensors[f"k.{layer}"] = kv.keys[layer][:, start:stop]
            self._tensors[f"v.{layer}"] = kv.values[layer][:, start:stop]
        described = {name: Described(part.dtype, tuple(part.shape)) for name, part in self._tensors.items()}
        self._head, self._placed = lay_out(described, {})
        self._found_head = bytearray(len(self._head))

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        views = [memoryview(self._found_head)] if start == 0 else []
        for name in names_within(self._placed, start, stop):
            views += byte_views(self._tensors[name])
        return views

    def accept(self, start: int, stop: int) -> Sequence[int]:
        if start == 0 and self._found_head != self._head:
            raise ChunkMismatch("its header is not that of this model's KV")
        return _whole_layers(self._placed, start, stop)


class _Decoding:
    """The header, at the beginning of the first part, says what the others hold; they wait for it."""

    def __init__(self, kv: PrefixKV, start: int, stop: int, codec: str) -> None:
        self._kv, self._start, self._stop, self._codec = kv, start, stop, codec
        self._buffers: dict[int, bytearray] = {}
        self._waiting: list[tuple[int, int]] = []
        self._placed: dict[str, Placed] | None = None
        self._raws: dict[str, Raw] = {}
        self._lock = threading.Lock()

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        self._buffers[start] = bytearray(stop - start)
        return [memoryview(self._buffers[start])]

    def accept(self, start: int, stop: int) -> Sequence[int]:
        with self._lock:
            self._waiting.append((start, stop))
            if start == 0:
                self._read_header()
            if self._placed is None:
                return ()
            ready, self._waiting = self._waiting, []
        return [layer for part in ready for layer in self._decode(self._placed, *part)]

    def _read_header(self) -> None:
        head = memoryview(self._buffers[0])
        placed = read_layout(head)
        described = {name: part.described for name, part in placed.items()}
        dtype = str(next(iter(self._kv.keys.values())).dtype).removeprefix("torch.")
        tokens = self._stop - self._start
        self._raws = read_raws(bytes(head), described, self._kv, tokens, codec=self._codec, dtype=dtype)
        self._placed = placed

    def _decode(self, placed: dict[str, Placed], start: int, stop: int) -> Sequence[int]:
        buffer = memoryview(self._buffers.pop(start))
        names = names_within(placed, start, stop)
        parts = group_parts({name: _tensor(buffer, placed[name], start) for name in names}, self._raws)
        layers = _whole_layers(placed, start, stop)
        for layer in layers:
            device = str(self._kv.keys[layer].device)
            self._kv.write(layer, self._start, *decode_layer(layer, parts, self._raws, self._codec, device))
        return layers


def _whole_layers(placed: dict[str, Placed], start: int, stop: int) -> Sequence[int]:
    within = set(names_within(placed, start, stop))
    layers = sorted({layer_of(name) for name in within})
    outside = {layer_of(name) for name in placed if name not in within}
    if outside.intersection(layers):
        raise ChunkMismatch("its parts do not hold whole layers")
    return layers


def _tensor(buffer: memoryview, placed: Placed, start: int) -> Tensor:
    """The tensor's bytes of a part that begins at `start`, without a copy where they are aligned."""
    described, begin, end = placed
    if begin == end:
        return torch.empty(described.shape, dtype=described.dtype)
    within = buffer[begin - start : end - start]
    if (begin - start) % described.dtype.itemsize:
        within = memoryview(bytearray(within))
    return torch.frombuffer(within, dtype=described.dtype).view(described.shape)
