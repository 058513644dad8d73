"""The entries of question files (YAML, CSV, JSONL or plain text), each with the line it stands on."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.errors import QuestionFileError

SCHEMA_FIELD = "json_schema"  # the one whose value is data, not text
_JSON_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?")

READABLE = (".yaml", ".yml", ".csv", ".jsonl", ".txt")


class RawEntry(NamedTuple):
    """An entry before it is checked; `fault` says what is wrong with how it is written."""

    value: Any
    place: str
    fault: str | None = None


def read_entries(path: Path) -> list[RawEntry]:
    """
    Raises:
        QuestionFileError: the file is missing, empty, of another type, or not of its format; with the line.
    """
    kind = path.suffix.lower()
    if kind not in READABLE:
        raise QuestionFileError(path, reason=f"questions are read from {', '.join(READABLE)}")
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError as exc:
        raise QuestionFileError(path, reason="the file does not exist") from exc
    except UnicodeDecodeError as exc:
        raise QuestionFileError(path, reason="the text is not UTF-8") from exc
    except (OSError, ValueError) as exc:  # ValueError: no file can have this name
        reason = getattr(exc, "strerror", None) or str(exc)
        raise QuestionFileError(path, reason=f"it cannot be read ({reason})") from exc
    readers = {".csv": _csv, ".jsonl": _jsonl, ".txt": _text}
    entries = list(readers.get(kind, _yaml)(path, text))
    if not entries:
        raise QuestionFileError(path, reason="it holds no question")
    return entries


def _text(path: Path, text: str) -> Iterator[RawEntry]:
    for line, content in _lines(text):
        if not content.startswith("#"):
            yield RawEntry(content, _place(path, line))


def _jsonl(path: Path, text: str) -> Iterator[RawEntry]:
    for line, content in _lines(text):
        try:
            yield RawEntry(json.loads(content), _place(path, line))
        except (ValueError, RecursionError) as exc:
            raise QuestionFileError(path, line=line, reason="this line is not JSON") from exc


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Those that hold something. Not splitlines(): it also splits where editors and JSON see no line end."""
    for line, content in enumerate(text.split("\n"), 1):
        if content.strip():
            yield line, content.strip()


def _csv(path: Path, text: str) -> Iterator[RawEntry]:
    columns: list[str] = []
    for line, row in _csv_rows(path, text):
        if not columns:
            columns = [name.strip().lower() for name in row]
            if columns.count("question") != 1:
                reason = "the first line names the columns, and one of them must be 'question'"
                raise QuestionFileError(path, line=line, reason=reason)
            continue
        if any(row[len(columns) :]):
            reason = "this line has more cells than the first; put quotes around text that holds commas"
            raise QuestionFileError(path, line=line, reason=reason)
        # Spreadsheet programs end lines in empty cells, also under no name.
        cells = {name: cell for name, cell in zip(columns, row, strict=False) if cell}
        yield RawEntry({"question": "", **cells}, _place(path, line))


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Rows that hold something, with the line each begins on."""
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    line = 1
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield line, row
            line = reader.line_num + 1
    except csv.Error as exc:
        raise QuestionFileError(path, line=line, reason=f"this line is not CSV ({exc})") from exc


class _PlainLoader(yaml.SafeLoader):
    """Refuses repeated parts (`*name`) other than text: a few of them, nested, make a small file endless."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call] # PyYAML's parser has no annotations
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent) and not isinstance(node, yaml.ScalarNode):
            raise yaml.composer.ComposerError(None, None, "only text may be repeated with *", event.start_mark)  # type: ignore[arg-type] # C and Python marks are alike
        return node


def _yaml(path: Path, text: str) -> Iterator[RawEntry]:
    root = _yaml_root(path, text)
    questions = root
    if isinstance(root, yaml.MappingNode):
        found = [value for key, value in root.value if key.value == "questions"]
        if len(found) > 1:
            raise QuestionFileError(path, line=_line(found[1]), reason="'questions:' stands a second time")
        questions = found[0] if found else None
    if not isinstance(questions, yaml.SequenceNode):
        reason = "it needs a list of questions, or a list under 'questions:'"
        raise QuestionFileError(path, line=_line(root) if root else None, reason=reason)
    for node in questions.value:
        yield RawEntry(_plain(node), _place(path, _line(node)), _repeated_field(node))


def _yaml_root(path: Path, text: str) -> yaml.Node | None:
    def wrong(problem: str, line: int | None = None) -> QuestionFileError:
        return QuestionFileError(path, line=line, reason=f"not valid YAML: {problem}")

    loader: _PlainLoader | None = None
    try:
        loader = _PlainLoader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        raise wrong("a character that YAML does not allow", line) from exc
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        problem = " ".join((exc.problem or "it cannot be understood").split())
        raise wrong(problem, mark.line + 1 if mark else None) from exc
    except (ValueError, OverflowError) as exc:  # PyYAML does not check the numbers of escapes and directives
        raise wrong("a number is too large", loader.line + 1 if loader else None) from exc
    except RecursionError as exc:
        raise wrong("it is nested too deeply") from exc


def _plain(node: yaml.Node) -> Any:
    """Text, lists and mappings. YAML would make a date of an id and false of the answer No: here text stays text."""
    if isinstance(node, yaml.MappingNode):
        return {
            name: (_typed if name == SCHEMA_FIELD else _plain)(value)
            for name, value in ((_name(key), value) for key, value in node.value)
        }
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    is_null = isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null")
    return None if is_null else node.value


def _typed(node: yaml.Node) -> Any:
    """As JSON: numbers, true, false and null are such where they stand without quotes; all else is text."""
    if isinstance(node, yaml.MappingNode):
        return {_name(key): _typed(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_typed(item) for item in node.value]
    is_bare = isinstance(node, yaml.ScalarNode) and node.style is None and _JSON_WORD.fullmatch(node.value)
    return json.loads(node.value) if is_bare else node.value


def _repeated_field(node: yaml.Node) -> str | None:
    """Mostly a forgotten dash between two questions, of which the first would be lost."""
    names = Counter(_name(key) for key, _ in node.value) if isinstance(node, yaml.MappingNode) else Counter()
    repeated = next((name for name, count in names.items() if count > 1), None)
    return f"has {repeated} twice; begin each question with a dash" if repeated else None


def _name(key: yaml.Node) -> str:
    return str(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping as a name"


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line + 1
    return line


def _place(path: Path, line: int) -> str:
    return f"{path.name}, line {line}"
