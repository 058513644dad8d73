"""One chunk is one safetensors file, whatever its codec.

The layout is canonical and rank-free: `k.<layer>` and `v.<layer>`, each [kv_heads, tokens, head_dim] in the compute
dtype. `none` stores these tensors and nothing else. The other codecs store parts, `k.<layer>.<part>`, and a header:
one entry `platemaker` of the file's metadata, JSON with codec, dtype and the shape of each tensor. Layers follow each
other in the file.
"""

from collections.abc import Mapping
from typing import get_args

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from kernels.codecs.base import Codec, Kind, Raw
from kernels.codecs.fp8 import Fp8
from kernels.codecs.int4 import Int4
from kernels.codecs.int8 import Int8
from kernels.codecs.layout import OWN_KEY, Described, lay_out, layer_of, own_metadata, part_stops, read_layout
from kernels.codecs.none import Plain
from kernels.codecs.shuffle_zstd import ShuffleZstd
from kernels.errors import ChunkMismatch
from kernels.kv import PrefixKV

LAYOUT = "layer-heads-tokens-dim"
CODECS: dict[str, Codec] = {codec.name: codec for codec in (Plain(), ShuffleZstd(), Int8(), Int4(), Fp8())}
MAX_TOKEN_BYTES = 16 << 20  # the largest models of today need a third of it in float32


class Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    codec: str
    dtype: str
    shapes: dict[str, tuple[PositiveInt, PositiveInt, PositiveInt]]


def encode_chunk(kv: PrefixKV, start: int, stop: int, codec: str) -> bytes:
    """The tokens [start, stop) of every layer that keeps them; equal KV gives equal bytes. Where no layer does, it is
    a header and nothing else, whatever the codec.

    Raises:
        NonFiniteKV: a lossy codec met NaN or infinity.
    """
    parts: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, int, int]] = {}
    dtype = ""
    for layer in sorted(kv.keys):
        for kind, held in _kinds(kv):
            tensor = held[layer][:, start:stop]
            name = f"{kind}.{layer}"
            dtype = _name(tensor.dtype)
            heads, tokens, dim = tensor.shape
            shapes[name] = (heads, tokens, dim)
            for part, stored in CODECS[codec].encode(kind, tensor).items():
                parts[f"{name}.{part}" if part else name] = stored
    header = Header(codec=codec, dtype=dtype, shapes=shapes)
    described = {name: Described(part.dtype, tuple(part.shape)) for name, part in parts.items()}
    head, _ = lay_out(described, {} if codec == Plain.name or not parts else {OWN_KEY: header.model_dump_json()})
    return b"".join([head, *(view for part in parts.values() for view in byte_views(part))])


def chunk_parts(data: bytes) -> tuple[int, ...]:
    """Where the parts of an encoded chunk end, which are fetched and proved one by one."""
    return part_stops(read_layout(memoryview(data)), len(data))


def decode_chunk(data: bytes, kv: PrefixKV, start: int, stop: int, *, codec: str, dtype: str, device: str) -> None:
    """Writes a chunk's tensors at [start, stop) of `kv`, or none of them.

    Raises:
        ChunkMismatch: not a chunk, or of another codec, shape or dtype than asked for or than what `kv` holds already.
    """
    try:
        stored = load(data)
    except (SafetensorError, KeyError) as exc:  # KeyError: a dtype that safetensors knows and torch does not
        raise ChunkMismatch("it is not a safetensors file") from exc
    described = {name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    raws = read_raws(data, described, kv, stop - start, codec=codec, dtype=dtype)
    parts = group_parts(stored, raws)
    decoded = {layer: decode_layer(layer, parts, raws, codec, device) for layer in sorted(map(layer_of, raws))}
    for layer, (k, v) in decoded.items():
        kv.write(layer, start, k, v)


def read_raws(
    data: bytes, stored: Mapping[str, Described], kv: PrefixKV, tokens: int, *, codec: str, dtype: str
) -> dict[str, Raw]:
    """What each tensor of a chunk has to become, by what its beginning says of it.

    Raises:
        ChunkMismatch: it is of another codec, shape or dtype than asked for or than what `kv` holds already.
    """
    header = _read_header(data)
    found = Plain.name if header is None else header.codec
    if found != codec or codec not in CODECS:
        raise ChunkMismatch(f"its codec is {found}, not {codec}" if found != codec else f"{codec} is no known codec")
    if header is None:
        claimed = {name: (_name(its_dtype), shape) for name, (its_dtype, shape) in stored.items()}
    else:
        claimed = {name: (header.dtype, shape) for name, shape in header.shapes.items()}
    raws = _check(claimed, kv, tokens, dtype)
    if header is not None and sum(raw.size_bytes for raw in raws.values()) > MAX_TOKEN_BYTES * tokens:
        raise ChunkMismatch("it claims more numbers a token than any model has")
    return raws


def group_parts(stored: Mapping[str, Tensor], raws: Mapping[str, Raw]) -> dict[str, dict[str, Tensor]]:
    """Each tensor's parts, by the tensor's name."""
    groups: dict[str, dict[str, Tensor]] = {}
    for full, tensor in stored.items():
        kind, _, rest = full.partition(".")
        layer, _, part = rest.partition(".")
        if f"{kind}.{layer}" not in raws:
            raise ChunkMismatch(f"{full} belongs to no layer of it")
        groups.setdefault(f"{kind}.{layer}", {})[part] = tensor
    return groups


def decode_layer(
    layer: int, parts: Mapping[str, Mapping[str, Tensor]], raws: Mapping[str, Raw], codec: str, device: str
) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, each [kv_heads, tokens, head_dim]."""
    k, v = (
        CODECS[codec].decode(kind, parts.get(f"{kind}.{layer}", {}), raws[f"{kind}.{layer}"], device)
        for kind in get_args(Kind)
    )
    return k, v


def _read_header(data: bytes) -> Header | None:
    """None: there is none, as in every chunk of the codec `none`."""
    found = own_metadata(data)
    try:
        return None if found is None else Header.model_validate_json(found)
    except ValidationError as exc:
        raise ChunkMismatch("its header is damaged") from exc


def _check(claimed: Mapping[str, tuple[str, tuple[int, ...]]], kv: PrefixKV, tokens: int, dtype: str) -> dict[str, Raw]:
    """What each tensor has to be, if what the chunk says of itself fits. A KV with room says which layers there are;
    otherwise they are counted from 0."""
    held = {f"{kind}.{layer}": tensor for kind, part in _kinds(kv) for layer, tensor in part.items()}
    counted = {f"{kind}.{layer}" for kind in get_args(Kind) for layer in range(len(claimed) // 2)}
    if claimed.keys() != (held.keys() or counted) or not claimed:
        raise ChunkMismatch("its layers are not complete")
    raws = {}
    for name, (its_dtype, shape) in claimed.items():
        if its_dtype != dtype:
            raise ChunkMismatch(f"its numbers are {its_dtype}, not {dtype}")
        if len(shape) != 3 or shape[1] != tokens:
            raise ChunkMismatch(f"{name} holds {shape}, not {tokens} tokens")
        raws[name] = Raw((shape[0], shape[1], shape[2]), getattr(torch, dtype))
    for name, tensor in held.items():
        heads, _, dim = tensor.shape
        if raws[name].shape != (heads, tokens, dim):  # would be broadcast, or fail halfway
            raise ChunkMismatch(f"{name} holds {raws[name].shape}, the chunks before it {heads} heads of {dim}")
    return raws


def byte_views(tensor: Tensor) -> list[memoryview]:
    """The tensor's own memory on the CPU, in order: one view, or one for each row of the first axis."""
    pieces = [tensor] if tensor.is_contiguous() else list(tensor)
    return [piece.view(torch.uint8).numpy().data.cast("B") for piece in pieces if piece.numel()]


def _kinds(kv: PrefixKV) -> tuple[tuple[Kind, dict[int, Tensor]], ...]:
    return ("k", kv.keys), ("v", kv.values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
