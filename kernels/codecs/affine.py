"""Rounding to few evenly spaced levels between the lowest and the highest number of a group, as KIVI does.

KIVI (arXiv:2402.02750): keys have a few channels far larger than the others, so they are grouped along the tokens,
each channel with a scale of its own; values have no such channels and are grouped along the channels, each token
with scales of its own.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.codecs.base import CHANNELS, TOKENS, Kind, Raw, take_finite, take_scale
from kernels.errors import NonFiniteKV

AXES: dict[Kind, int] = {"k": TOKENS, "v": CHANNELS}
SCALE_DTYPE = torch.bfloat16  # the range of float32 in two bytes; its rounding only widens the levels by 0.8 %
UP = 1 + 2**-8  # so that rounding a scale to bfloat16 never makes it smaller
TINY = torch.finfo(SCALE_DTYPE).tiny


class Quantised(NamedTuple):
    """number = low + level * scale. `levels` is uint8 in the tensor's shape; in `scale` (bfloat16) and `low` (the
    tensor's dtype, exact) the grouped axis counts groups."""

    levels: Tensor
    scale: Tensor
    low: Tensor


def quantise(tensor: Tensor, *, axis: int, group: int, highest: int) -> Quantised:
    """Levels 0 to `highest` for each run of `group` numbers along the axis; the last run may be shorter.

    Raises:
        NonFiniteKV: NaN, infinity, or a range beyond float32.
    """
    length = tensor.shape[axis]
    wide = tensor.float()
    if missing := -length % group:  # filled with the last number, which changes no lowest and no highest
        last = wide.narrow(axis, length - 1, 1)
        wide = torch.cat([wide, *[last] * missing], axis)
    grouped = torch.unflatten(wide, axis, (-1, group))
    low = grouped.amin(axis + 1, keepdim=True)
    spread = grouped.amax(axis + 1, keepdim=True) - low
    if not bool(torch.isfinite(spread).all()):
        raise NonFiniteKV
    scale = (spread / highest * UP).clamp_min(TINY).to(SCALE_DTYPE)
    levels = ((grouped - low) / scale.float()).round_().clamp_(0, highest).to(torch.uint8)
    levels = levels.flatten(axis, axis + 1).narrow(axis, 0, length)
    return Quantised(levels, scale.squeeze(axis + 1), low.squeeze(axis + 1).to(tensor.dtype))


def dequantise(stored: Quantised, *, axis: int, group: int) -> Tensor:
    """The numbers, in the dtype of `low`; never infinite."""
    levels, scale, low = stored
    length = levels.shape[axis]
    wide = levels.float()
    if missing := -length % group:
        wide = pad(wide, [0, 0] * (CHANNELS - axis) + [0, missing])
    grouped = torch.unflatten(wide, axis, (-1, group))
    numbers = grouped.mul_(scale.float().unsqueeze(axis + 1)).add_(low.float().unsqueeze(axis + 1))
    limit = torch.finfo(low.dtype).max
    return numbers.clamp_(-limit, limit).flatten(axis, axis + 1).narrow(axis, 0, length).to(low.dtype)


def take_scales(parts: Mapping[str, Tensor], raw: Raw, *, axis: int, group: int) -> tuple[Tensor, Tensor]:
    """The parts `scale` and `low`, proved usable.

    Raises:
        ChunkMismatch: they are not.
    """
    shape = list(raw.shape)
    shape[axis] = -(-raw.shape[axis] // group)
    return take_scale(parts, tuple(shape), SCALE_DTYPE), take_finite(parts, "low", tuple(shape), raw.dtype)
