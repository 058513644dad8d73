"""Where each tensor of a chunk lies in its file.

The file is of the safetensors format (an eight-byte length, a JSON header, the numbers), written here and not by its
library, which orders tensors by type and name: here they follow each other layer after layer, so that a run of layers
is one run of bytes, which can be fetched and proved on its own.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from kernels.errors import ChunkMismatch

PART_BYTES = 32 << 20  # a part is as many whole layers as reach this; each costs a request
NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
METADATA_KEY = "__metadata__"
OWN_KEY = "platemaker"  # one entry: safetensors writes several in any order, and equal tensors must give equal bytes


class Described(NamedTuple):
    """What a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Placed(NamedTuple):
    """What a tensor is, and the bytes [start, stop) of the file that hold it."""

    described: Described
    start: int
    stop: int


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    shape: list[NonNegativeInt]
    data_offsets: list[NonNegativeInt]


_ENTRIES = TypeAdapter(dict[str, _Entry])


def lay_out(tensors: Mapping[str, Described], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Placed]]:
    """The file's beginning, and where the tensors come to lie behind it, in the order given."""
    header: dict[str, object] = {METADATA_KEY: metadata} if metadata else {}
    at = 0
    offsets = []
    for name, described in tensors.items():
        stop = at + described.size_bytes
        header[name] = {"dtype": NAMES[described.dtype], "shape": described.shape, "data_offsets": (at, stop)}
        offsets.append((at, stop))
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    placed = {
        name: Placed(described, len(head) + start, len(head) + stop)
        for (name, described), (start, stop) in zip(tensors.items(), offsets, strict=True)
    }
    return head, placed


def read_layout(data: memoryview) -> dict[str, Placed]:
    """Where the tensors lie in the file that begins with `data`, in their order.

    Raises:
        ChunkMismatch: that is no beginning of a chunk.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 + size:
        raise ChunkMismatch("its header is cut off")
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        if isinstance(header, dict):
            header.pop(METADATA_KEY, None)
        entries = _ENTRIES.validate_python(header)
    except (ValueError, ValidationError) as exc:
        raise ChunkMismatch("its header is damaged") from exc
    placed = {}
    at = 0
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise ChunkMismatch(f"{entry.dtype} is no type of number that it may hold")
        described = Described(DTYPES[entry.dtype], tuple(entry.shape))
        if entry.data_offsets != [at, at + described.size_bytes]:
            raise ChunkMismatch("its tensors do not follow each other")
        placed[name] = Placed(described, 8 + size + at, 8 + size + entry.data_offsets[1])
        at = entry.data_offsets[1]
    return placed


def own_metadata(data: bytes) -> str | None:
    """What the file that begins with `data` says of itself in its one entry of metadata; None: it has none.

    Raises:
        ChunkMismatch: its header is damaged.
    """
    size = int.from_bytes(data[:8], "little")
    try:
        metadata = json.loads(data[8 : 8 + size]).get(METADATA_KEY) or {}
        found: str | None = metadata.get(OWN_KEY)
    except (ValueError, AttributeError) as exc:
        raise ChunkMismatch("its header is damaged") from exc
    return found


def layer_of(name: str) -> int:
    """Of `k.<layer>` or `v.<layer>.<part>`.

    Raises:
        ChunkMismatch: it is no such name.
    """
    pieces = name.split(".")
    if len(pieces) < 2 or pieces[0] not in ("k", "v") or not pieces[1].isdecimal():
        raise ChunkMismatch(f"{name} is no tensor of a layer")
    return int(pieces[1])


def part_stops(placed: Mapping[str, Placed], size_bytes: int) -> tuple[int, ...]:
    """Where the parts of a file end: each holds whole layers, the first one the header too."""
    ends: dict[int, int] = {}
    for name, tensor in placed.items():
        ends[layer_of(name)] = tensor.stop
    stops: list[int] = []
    for end in ends.values():
        if end - (stops[-1] if stops else 0) >= PART_BYTES:
            stops.append(end)
    if not stops or stops[-1] != size_bytes:
        # The rest joins the last part where it is small, so that no part is.
        if len(stops) > 1 and size_bytes - stops[-1] < PART_BYTES // 2:
            stops.pop()
        stops.append(size_bytes)
    return tuple(stops)


def names_within(placed: Mapping[str, Placed], start: int, stop: int) -> Sequence[str]:
    """The tensors that lie in the bytes [start, stop).

    Raises:
        ChunkMismatch: a tensor lies there in part only.
    """
    names = [name for name, tensor in placed.items() if start <= tensor.start and tensor.stop <= stop]
    held = sum(placed[name].stop - placed[name].start for name in names)
    head = min((tensor.start for tensor in placed.values()), default=stop)
    if held != stop - max(start, head):
        raise ChunkMismatch("its parts do not hold whole tensors")
    return names
