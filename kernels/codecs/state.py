"""What is not stored by tokens (windows, recurrent states) is one safetensors file, never lossy.

Its tensors are those of `PrefixKV.state`; one metadata entry `platemaker` holds the number of tokens they stand behind.
"""

import json

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from kernels.errors import ChunkMismatch
from kernels.kv import PrefixKV

METADATA = "platemaker"  # one entry: safetensors writes several in any order, and equal states must give equal bytes


class StateHeader(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    length: PositiveInt


def encode_state(kv: PrefixKV) -> bytes:
    """The state behind `kv.length` tokens; equal states give equal bytes. Without tensors for a model that has none."""
    tensors = {name: tensor.cpu() for name, tensor in kv.state().items()}
    data: bytes = save(tensors, {METADATA: StateHeader(length=kv.length).model_dump_json()})
    return data


def decode_state(data: bytes, kv: PrefixKV, length: int, *, device: str) -> None:
    """Puts a state into `kv`, which then ends at `length`; or changes nothing.

    Raises:
        ChunkMismatch: not a state, not that behind `length` tokens, or not this model's.
    """
    try:
        tensors = load(data)
    except (SafetensorError, KeyError) as exc:  # KeyError: a dtype that safetensors knows and torch does not
        raise ChunkMismatch("its state is not a safetensors file") from exc
    found = _read_header(data).length
    if found != length:
        raise ChunkMismatch(f"its state stands behind {found} tokens, not {length}")
    kv.set_state(length, {name: tensor.to(device) for name, tensor in tensors.items()})


def _read_header(data: bytes) -> StateHeader:
    size = int.from_bytes(data[:8], "little")
    try:
        return StateHeader.model_validate_json(json.loads(data[8 : 8 + size])["__metadata__"][METADATA])
    except (ValueError, KeyError, TypeError, ValidationError) as exc:
        raise ChunkMismatch("the header of its state is damaged") from exc
