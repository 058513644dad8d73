"""Playbooks that ship with Platemaker."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "builtin"


def built_in_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def playbook_path(name: Path, folder: Path | None = None) -> Path:
    """The file that a name means: a file there is, seen from `folder`, else the built-in playbook of that name."""
    path = folder / name if folder else name
    return _FOLDER / f"{name}.yaml" if str(name) in built_in_names() and not path.is_file() else path
