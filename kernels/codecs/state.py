"""What is not stored by tokens (windows, recurrent states) is one safetensors file, never lossy.

Its tensors are those of `PrefixKV.state`; one metadata entry `platemaker` holds the number of tokens they stand behind.
"""

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from kernels.codecs.layout import OWN_KEY, own_metadata
from kernels.errors import ChunkMismatch
from kernels.kv import PrefixKV


class StateHeader(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    length: PositiveInt


def encode_state(kv: PrefixKV) -> bytes:
    """The state behind `kv.length` tokens; equal states give equal bytes. Without tensors for a model that has none."""
    tensors = {name: tensor.cpu() for name, tensor in kv.state().items()}
    data: bytes = save(tensors, {OWN_KEY: StateHeader(length=kv.length).model_dump_json()})
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
    try:
        return StateHeader.model_validate_json(own_metadata(data) or "")
    except ValidationError as exc:
        raise ChunkMismatch("the header of its state is damaged") from exc
