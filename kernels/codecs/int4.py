"""`int4`: 16 levels in groups of 32, keys along the tokens, values along the channels (KIVI, arXiv:2402.02750)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.codecs.affine import AXES, Quantised, dequantise, quantise, take_scales
from kernels.codecs.base import Kind, Raw, take

GROUP = 32


class Int4:
    """The parts are `q`, uint8, two neighbours along the grouped axis in a byte with the first in the low half, and
    `scale` and `low`, in which that axis counts groups."""

    name = "int4"
    lossless = False

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        axis = AXES[kind]
        made = quantise(tensor, axis=axis, group=GROUP, highest=15)
        return {"q": pack(made.levels, axis).cpu(), "scale": made.scale.cpu(), "low": made.low.cpu()}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], raw: Raw, device: str) -> Tensor:
        axis = AXES[kind]
        scale, low = take_scales(parts, raw, axis=axis, group=GROUP)
        shape = list(raw.shape)
        shape[axis] = -(-raw.shape[axis] // 2)
        packed = take(parts, "q", tuple(shape), torch.uint8).to(device)
        stored = Quantised(unpack(packed, axis, raw.shape[axis]), scale.to(device), low.to(device))
        return dequantise(stored, axis=axis, group=GROUP)


def pack(levels: Tensor, axis: int) -> Tensor:
    packed = _every_other(levels, axis, 0).contiguous()
    second = _every_other(levels, axis, 1)
    packed.narrow(axis, 0, second.shape[axis]).bitwise_or_(second << 4)
    return packed


def unpack(packed: Tensor, axis: int, length: int) -> Tensor:
    shape = list(packed.shape)
    shape[axis] = length
    levels = packed.new_empty(shape)
    _every_other(levels, axis, 0).copy_(packed & 15)
    _every_other(levels, axis, 1).copy_(packed.narrow(axis, 0, length // 2) >> 4)
    return levels


def _every_other(tensor: Tensor, axis: int, offset: int) -> Tensor:
    return tensor[(slice(None),) * axis + (slice(offset, None, 2),)]
