"""What a snapshot is keyed by: every field that changes the numbers, each named before hashing."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

FORMAT_VERSION = 2


@dataclass(frozen=True)
class Fingerprint:
    """Digests are SHA-256 in hex. `adapter` is empty where there is none."""

    tenant: str
    document_id: str
    prefix_ids: str
    weights: str
    config: str
    adapter: str
    tokenizer: str
    template: str
    kv_dtype: str
    codec: str
    layout: str
    format_version: int = FORMAT_VERSION

    def fields(self) -> dict[str, str | int]:
        return asdict(self)

    def digest(self) -> str:
        """The snapshot's key: SHA-256 of the canonical JSON of all fields."""
        return _digest(self.fields())

    def chain_root(self) -> str:
        """Where the chunk chain of this fingerprint starts: all fields but the document's own."""
        fields = {name: value for name, value in self.fields().items() if name not in ("document_id", "prefix_ids")}
        return _digest(fields)


def chunk_keys(root: str, ids: list[int], stops: Sequence[int]) -> list[str]:
    """Keys of the chunks of a prefix that end at `stops`: a hash chain over its token ids, so equal beginnings have
    equal keys."""
    keys = []
    parent = root
    for start, stop in pairwise((0, *stops)):
        parent = _digest({"parent": parent, "ids": ids[start:stop]})
        keys.append(parent)
    return keys


def state_key(chunk_key: str) -> str:
    """Key of the state behind a chunk."""
    return _digest({"state behind": chunk_key})


def _digest(value: Mapping[str, object]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
