"""`int8`: 256 levels, keys per channel over the chunk's tokens, values per token (KIVI, arXiv:2402.02750)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.codecs.affine import AXES, Quantised, dequantise, quantise, take_scales
from kernels.codecs.base import Kind, Raw, take


class Int8:
    """The parts are `q`, uint8 in the tensor's shape, and `scale` and `low`, [kv_heads, 1, head_dim] for keys and
    [kv_heads, tokens, 1] for values."""

    name = "int8"
    lossless = False

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        axis = AXES[kind]
        made = quantise(tensor, axis=axis, group=tensor.shape[axis], highest=255)
        return {"q": made.levels.cpu(), "scale": made.scale.cpu(), "low": made.low.cpu()}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], raw: Raw, device: str) -> Tensor:
        axis = AXES[kind]
        group = raw.shape[axis]
        scale, low = take_scales(parts, raw, axis=axis, group=group)
        levels = take(parts, "q", raw.shape, torch.uint8)
        stored = Quantised(levels.to(device), scale.to(device), low.to(device))
        return dequantise(stored, axis=axis, group=group)
