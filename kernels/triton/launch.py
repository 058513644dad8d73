"""How the work of a kernel is cut: sizes of its blocks, and the number of parts a document is split into."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MIN_SPLIT_KEYS = 256  # a shorter part costs more in merging than it wins


class Blocks(NamedTuple):
    """`rows` x `keys` scores are held at once. `waves` is how many programs one multiprocessor runs side by side."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    waves: int


class Split(NamedTuple):
    parts: int
    keys: int


def power_of_two(size: int, least: int = 16) -> int:
    """The next power of two; tensor cores take nothing below 16."""
    return max(least, 1 << (size - 1).bit_length())


def pick_blocks(rows: int, head_dim: int, v_dim: int, dtype: torch.dtype) -> Blocks:
    """Measured on an H200 with 16-bit heads of 128, see docs/engine-notes.md; the others are chosen so that their tiles
    fit its shared memory."""
    wide = max(power_of_two(head_dim), power_of_two(v_dim))
    if dtype == torch.float32:
        return Blocks(min(power_of_two(rows), 32), 32, 4, 2 if wide <= 128 else 1, 1)
    block_rows = min(power_of_two(rows), 64)
    if wide > 128:
        return Blocks(block_rows, 64, 8, 2, 1)
    return Blocks(block_rows, 64, 4, 3, 1 if 32 < rows <= 64 else 2)


def pick_int8_blocks(rows: int, head_dim: int, v_dim: int, dtype: torch.dtype, chunk_tokens: int) -> Blocks:
    """The same over int8 KV. Every block of rows makes the numbers anew, so blocks are larger; and a block of keys must
    not cross the border of a chunk.

    Raises:
        ValueError: the chunks are not multiples of 16 tokens.
    """
    if chunk_tokens % 16:
        raise ValueError(f"int8 KV is read in blocks of 16 tokens; chunks of {chunk_tokens} cannot be cut so")
    blocks = pick_blocks(rows, head_dim, v_dim, dtype)
    if dtype != torch.float32 and max(head_dim, v_dim) <= 128:
        blocks = Blocks(128, 64, 8, 3, 1) if rows > 64 else blocks._replace(waves=2)
    return blocks._replace(keys=math.gcd(blocks.keys, chunk_tokens))


def split_keys(num_keys: int, programs: int, blocks: Blocks, device: torch.device) -> Split:
    """Cuts `num_keys` keys so that `programs` programs for each part fill the device."""
    room = num_multiprocessors(device) * blocks.waves // max(programs, 1)
    count = max(1, min(room, num_keys // MIN_SPLIT_KEYS))
    keys = max(1, math.ceil(num_keys / count / blocks.keys)) * blocks.keys
    return Split(max(1, math.ceil(num_keys / keys)), keys)


def pick_precision(tensor: Tensor) -> str:
    """How to multiply: fp32 exactly (tf32 would break the promise of equal answers), and everything widened to fp32
    in the interpreter, which knows no bfloat16 products."""
    if tensor.device.type == "cpu":
        return "widened"
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4  # the interpreter runs one program after the other; four make it split all the same
    return int(torch.get_device_module(device).get_device_properties(device).multi_processor_count)


def rows_apart(tensor: Tensor) -> Tensor:
    """The tensor itself if the numbers of a row lie side by side, as the kernels need it, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
