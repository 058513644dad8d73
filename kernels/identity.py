"""Digests of everything in a model folder that changes its numbers. A name is not an identity. No torch here."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.architecture import VOLATILE
from kernels.errors import ModelIncomplete
from kernels.folder import weight_files
from kernels.settings import user_cache_dir

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class ModelIdentity:
    """SHA-256 digests (hex) of a model's parts, plus the type its KV is kept in. `adapter` is empty where there is
    none."""

    weights: str
    config: str
    adapter: str
    tokenizer: str
    template: str
    kv_dtype: str


def digest_json(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def config_digest(config: dict[str, Any]) -> str:
    """Of the effective text config, without the entries that only tell where it came from."""
    return digest_json({key: value for key, value in config.items() if key not in VOLATILE})


def tokenizer_digest(folder: Path) -> str:
    found = {name: file_digest(folder / name) for name in TOKENIZER_FILES if (folder / name).exists()}
    if not found:
        raise ModelIncomplete(str(folder), "it has no tokenizer files")
    return digest_json(found)


def weights_digest(folder: Path) -> str:
    """Of the content of the weight files, whatever the folder is called.

    Each file's digest is remembered in the user's cache under its path, size and time of change.

    Raises:
        ModelIncomplete: a file is missing or cut off.
    """
    files = weight_files(folder)
    memory = user_cache_dir() / "digests.json"
    known = _read_memory(memory)
    digests = {}
    for path in files:
        stat = path.stat()
        key = f"{path.resolve()}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in known:
            known[key] = file_digest(path)
            _write_memory(memory, known)
        digests[path.name] = known[key]
    return digest_json(digests)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_memory(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_memory(path: Path, known: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(known, indent=1), "utf-8")
    fresh.replace(path)
