"""The entries of playbooks with their includes put in and their variables filled in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.errors import QuestionFileError
from pipeline.playbooks.library import playbook_path
from pipeline.playbooks.variables import fill
from pipeline.question_files import RawEntry, RawFile, read_file

DEEPEST = 8


@dataclass
class Expansion:
    """Reads playbooks with the given values of variables. `used` grows by the variables that questions need.

    A value from the command line wins over the file's, and an including file's over the included one's.
    """

    values: Mapping[str, str]
    used: set[str] = field(default_factory=set)

    def entries(self, name: Path) -> list[RawEntry]:
        """
        Raises:
            QuestionFileError: this file or one that it includes cannot be read, or they include each other.
        """
        path = playbook_path(name)
        return list(self._expanded(read_file(path), self.values, (path.resolve(),)))

    def _expanded(self, file: RawFile, values: Mapping[str, str], within: tuple[Path, ...]) -> Iterator[RawEntry]:
        values = {**file.variables, **values}
        for entry in file.entries:
            if isinstance(entry.value, dict) and set(entry.value) == {"include"}:
                yield from self._expanded(*self._included(file, entry, values, within))
                continue
            value, missing = fill(entry.value, values, used=self.used)
            faults = tuple(f"uses {{{name}}}, which has no value; give --set {name}=VALUE" for name in missing)
            yield replace(entry, value=value, faults=entry.faults + faults)

    def _included(
        self, file: RawFile, entry: RawEntry, values: Mapping[str, str], within: tuple[Path, ...]
    ) -> tuple[RawFile, Mapping[str, str], tuple[Path, ...]]:
        name = entry.value["include"]
        if not isinstance(name, str) or not name or "\0" in name:
            raise QuestionFileError(file.path, line=entry.line, reason="an include needs the name of a playbook")
        path = playbook_path(Path(name), file.path.parent)
        if path.resolve() in within:
            raise QuestionFileError(file.path, line=entry.line, reason=f"{name} includes itself")
        if len(within) == DEEPEST:
            raise QuestionFileError(file.path, line=entry.line, reason=f"includes go deeper than {DEEPEST} files")
        if not path.is_file():
            reason = f"the included {name} is neither a file beside it nor a built-in playbook"
            raise QuestionFileError(file.path, line=entry.line, reason=reason)
        return read_file(path), values, (*within, path.resolve())
