"""`fp8`: torch.float8_e4m3fn, three bits of mantissa, with one scale for each KV head of a chunk."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.codecs.base import Kind, Raw, take, take_finite, take_scale
from kernels.errors import NonFiniteKV

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
TINY = torch.finfo(torch.float32).tiny


class Fp8:
    """The parts are `q`, float8 in the tensor's shape, and `scale`, float32 [kv_heads, 1, 1]. Only the CPU has to
    know the type."""

    name = "fp8"
    lossless = False

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        wide = tensor.float()
        peak = wide.abs().amax((1, 2), keepdim=True)
        if not bool(torch.isfinite(peak).all()):
            raise NonFiniteKV
        scale = (peak / LARGEST).clamp_min(TINY)
        scaled = (wide / scale).clamp_(-LARGEST, LARGEST)  # beyond its largest number, float8_e4m3fn is NaN
        return {"q": scaled.cpu().to(FP8), "scale": scale.cpu()}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], raw: Raw, device: str) -> Tensor:
        scale = take_scale(parts, (raw.shape[0], 1, 1), torch.float32)
        numbers = take_finite({"q": take(parts, "q", raw.shape, FP8).float()}, "q", raw.shape, torch.float32)
        limit = torch.finfo(raw.dtype).max
        return numbers.mul_(scale).clamp_(-limit, limit).to(raw.dtype).to(device)
