"""What a codec is: one tensor of a chunk as named parts, and back."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.errors import ChunkMismatch

Kind = Literal["k", "v"]
TOKENS, CHANNELS = 1, 2  # axes of [kv_heads, tokens, head_dim]


class Raw(NamedTuple):
    """What a tensor was before it was encoded: `shape` is [kv_heads, tokens, head_dim]."""

    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        heads, tokens, dim = self.shape
        return heads * tokens * dim * self.dtype.itemsize


class Codec(Protocol):
    """Stateless; called by several threads at once."""

    name: str
    lossless: bool

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        """The parts, on the CPU, of a tensor [kv_heads, tokens, head_dim] of keys or values, whose heads may lie
        apart. The part named "" is stored under the tensor's own name.

        Raises:
            NonFiniteKV: a lossy codec met NaN or infinity.
        """

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], raw: Raw, device: str) -> Tensor:
        """The tensor on the device, from parts that nobody has checked yet.

        Raises:
            ChunkMismatch: the parts are not those of such a tensor.
        """


def take(parts: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The named part, of this shape and dtype.

    Raises:
        ChunkMismatch: it is another, or missing.
    """
    part = parts.get(name)
    if part is None:
        raise ChunkMismatch(f"its part {name!r} is missing")
    if part.shape != shape or part.dtype != dtype:
        raise ChunkMismatch(f"its part {name!r} holds {tuple(part.shape)} {part.dtype}, not {shape} {dtype}")
    return part


def take_finite(parts: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same, without NaN or infinity in it."""
    part = take(parts, name, shape, dtype)
    if not bool(torch.isfinite(part).all()):
        raise ChunkMismatch(f"its part {name!r} is not finite")
    return part


def take_scale(parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The part `scale`: finite and above zero."""
    scale = take_finite(parts, "scale", shape, dtype)
    if not bool((scale > 0).all()):
        raise ChunkMismatch("its part 'scale' is not positive")
    return scale
