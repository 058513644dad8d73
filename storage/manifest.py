"""The manifest of a snapshot: what it is of, which chunks hold it, and how to prove them."""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import xxhash
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from storage.errors import SnapshotCorrupt


class Part(NamedTuple):
    """Bytes of a chunk, from where the part before ends up to `stop`, that are read and proved on their own."""

    stop: int
    xxh3: str


class ChunkEntry(BaseModel):
    """A stored chunk: the tokens [start, stop), and what proves its bytes, whole and part by part. Of a state, which
    stands behind `stop` tokens, start is stop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    start: int
    stop: int
    size_bytes: int
    xxh3: str
    sha256: str
    parts: tuple[Part, ...]

    @property
    def object_key(self) -> str:
        return chunk_object_key(self.key)


class Producer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    device: str
    torch: str


class CodecError(BaseModel):
    """What a lossy codec did to the model: the relative error (l2) of the last prefix token's logits, and the share
    of the last chunk's tokens after which the best next token stayed the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    logit_rel_error: FiniteFloat
    top1_agreement: FiniteFloat


class Manifest(BaseModel):
    """Stored as JSON under `manifests/<tenant>/<document_id>/<fingerprint>.json`, after all its chunks.

    `codec` is the one that the chunks are really in; the fingerprint names the one that was asked for. They differ
    where a lossy codec lost too much and the chunks were stored exactly. `codec_error` is there for lossy codecs,
    `states` for models with windows or recurrent layers: what a prefill can go on behind, the last behind all tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: dict[str, str | int]
    num_tokens: int
    num_layers: int
    chunks: tuple[ChunkEntry, ...]
    codec: str
    probe_token_ids: tuple[int, ...]
    probe_logits: tuple[float, ...]
    producer: Producer
    codec_error: CodecError | None = None
    states: tuple[ChunkEntry, ...] | None = None

    @property
    def objects(self) -> tuple[ChunkEntry, ...]:
        """Everything that is stored beside the manifest."""
        return self.chunks + (self.states or ())

    def encode(self) -> bytes:
        return self.model_dump_json(indent=1, exclude_none=True).encode()

    @classmethod
    def decode(cls, data: bytes, key: str) -> "Manifest":
        """
        Raises:
            SnapshotCorrupt: not a manifest.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as exc:
            raise SnapshotCorrupt(key, expected="a manifest", actual=f"{exc.error_count()} errors in it") from exc


def manifest_object_key(tenant: str, document_id: str, fingerprint: str) -> str:
    return f"manifests/{tenant}/{document_id}/{fingerprint}.json"


def chunk_object_key(chunk_key: str) -> str:
    return f"chunks/{chunk_key}.safetensors"


def chunk_key_of(object_key: str) -> str:
    return object_key.removeprefix("chunks/").removesuffix(".safetensors")


def describe_chunk(key: str, start: int, stop: int, data: bytes, part_stops: Sequence[int]) -> ChunkEntry:
    """`part_stops` are where its parts end, the last one at the end of `data`."""
    view = memoryview(data)
    begins = (0, *part_stops)
    return ChunkEntry(
        key=key,
        start=start,
        stop=stop,
        size_bytes=len(data),
        xxh3=xxhash.xxh3_128_hexdigest(data),
        sha256=hashlib.sha256(data).hexdigest(),
        parts=tuple(Part(end, xxhash.xxh3_128_hexdigest(view[begin:end])) for begin, end in pairwise(begins)),
    )


def verify_chunk(entry: ChunkEntry, data: bytes) -> None:
    """
    Raises:
        SnapshotCorrupt: the bytes are not those that were stored.
    """
    if len(data) != entry.size_bytes:
        raise SnapshotCorrupt(entry.object_key, expected=f"{entry.size_bytes} bytes", actual=f"{len(data)} bytes")
    found = xxhash.xxh3_128_hexdigest(data)
    if found != entry.xxh3:
        raise SnapshotCorrupt(entry.object_key, expected=entry.xxh3, actual=found)
