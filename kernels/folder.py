"""The weight files of a model folder, and whether they are whole. Reads their headers only; no torch here."""

import json
from pathlib import Path
from typing import Any

from kernels.errors import ModelIncomplete

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000  # safetensors' own limit


def weight_files(folder: Path) -> list[Path]:
    """The files that are loaded, in order of their names: one, or those that the index names. Others in the folder are
    not looked at.

    Raises:
        ModelIncomplete: one is missing, or cut off, or there is no telling which belong to the model.
    """
    names = [SINGLE] if (folder / SINGLE).is_file() else _indexed(folder)
    for name in names:
        if not (folder / name).is_file():
            raise ModelIncomplete(str(folder), f"{name} is missing, which {INDEX} names")
        _check_whole(folder, name)
    return [folder / name for name in names]


def _indexed(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if found:
            raise ModelIncomplete(str(folder), f"it has {found[0]}, but neither {SINGLE} nor {INDEX}")
        others = [*folder.glob("*.bin"), *folder.glob("*.pth")]
        hint = f" ({others[0].name} is pickled and never read)" if others else ""
        raise ModelIncomplete(str(folder), f"it has no .safetensors file{hint}")
    try:
        weight_map = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelIncomplete(str(folder), f"{INDEX} is damaged") from exc
    if not names or any(Path(name).name != name for name in names):
        raise ModelIncomplete(str(folder), f"{INDEX} is damaged")
    return names


def _check_whole(folder: Path, name: str) -> None:
    """A safetensors file is 8 bytes, a header of so many bytes, and what the header describes."""
    path = folder / name
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(header_size) if header_size <= LONGEST_HEADER else b""
    try:
        described: dict[str, Any] = json.loads(header)
        ends = [int(entry["data_offsets"][1]) for key, entry in described.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as exc:
        raise ModelIncomplete(str(folder), f"{name} is cut off or no safetensors file") from exc
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        how = "is cut off" if size < expected else "is too long"
        raise ModelIncomplete(str(folder), f"{name} {how}: {size:,} of {expected:,} bytes")
