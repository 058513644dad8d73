"""The entries of question files (YAML, CSV, JSONL, XLSX or plain text), each with the line it stands on."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import QuestionFileError
from pipeline.playbooks.workbook import workbook_rows

READABLE = (".yaml", ".yml", ".csv", ".jsonl", ".xlsx", ".txt")
SCHEMA_FIELD = "json_schema"  # the one whose value is data, not text
_JSON_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True)
class RawEntry:
    """An entry before it is checked; `faults` say what is wrong with how it is written, or why it cannot be used.

    `line` is where it begins, `marks` are lines and columns of its fields, where the format has them.
    """

    value: Any
    place: str
    faults: tuple[str, ...] = ()
    path: Path | None = None
    line: int | None = None
    marks: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RawFile:
    """A question file as it is written: entries, includes among them, and the variables it gives values to."""

    path: Path
    entries: list[RawEntry]
    title: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def read_file(path: Path) -> RawFile:
    """
    Raises:
        QuestionFileError: the file is missing, empty, of another type, or not of its format; with the line, and with
            the other lines that are wrong.
    """
    kind = path.suffix.lower()
    if kind not in READABLE:
        raise QuestionFileError(path, reason=f"questions are read from {', '.join(READABLE)}")
    if kind == ".xlsx":
        found = RawFile(path, _all(_table(path, workbook_rows(path), "row")))
    elif kind in (".yaml", ".yml"):
        found = _yaml(path, _read_text(path))
    else:
        reader = {".csv": _csv, ".jsonl": _jsonl, ".txt": _text}[kind]
        found = RawFile(path, _all(reader(path, _read_text(path))))
    if not found.entries:
        raise QuestionFileError(path, reason="it holds no question")
    return found


def _all(found: Iterator[RawEntry | QuestionFileError]) -> list[RawEntry]:
    entries, wrong = [], []
    for entry in found:
        if isinstance(entry, QuestionFileError):
            wrong.append(entry)
        else:
            entries.append(entry)
    if wrong:
        wrong[0].others = tuple(wrong[1:])
        raise wrong[0]
    return entries


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError as exc:
        raise QuestionFileError(path, reason="the file does not exist") from exc
    except UnicodeDecodeError as exc:
        raise QuestionFileError(path, reason="the text is not UTF-8") from exc
    except (OSError, ValueError) as exc:  # ValueError: no file can have this name
        reason = getattr(exc, "strerror", None) or str(exc)
        raise QuestionFileError(path, reason=f"it cannot be read ({reason})") from exc


def _text(path: Path, text: str) -> Iterator[RawEntry | QuestionFileError]:
    for line, content in _lines(text):
        if not content.startswith("#"):
            yield _entry(path, line, content)


def _jsonl(path: Path, text: str) -> Iterator[RawEntry | QuestionFileError]:
    for line, content in _lines(text):
        try:
            yield _entry(path, line, json.loads(content))
        except (ValueError, RecursionError):
            yield QuestionFileError(path, line=line, reason="this line is not JSON")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Those that hold something. Not splitlines(): it also splits where editors and JSON see no line end."""
    for line, content in enumerate(text.split("\n"), 1):
        if content.strip():
            yield line, content.strip()


def _csv(path: Path, text: str) -> Iterator[RawEntry | QuestionFileError]:
    return _table(path, _csv_rows(path, text), "line")


def _table(path: Path, rows: Iterator[tuple[int, list[str]]], what: str) -> Iterator[RawEntry | QuestionFileError]:
    """Entries of a table whose first row names the columns; `what` a row is called there."""
    columns: list[str] = []
    for line, row in rows:
        if not columns:
            columns = [name.strip().lower() for name in row]
            if columns.count("question") != 1:
                reason = f"the first {what} names the columns, and one of them must be 'question'"
                raise QuestionFileError(path, line=line, reason=reason, unit=what)
            continue
        if any(row[len(columns) :]):
            reason = f"this {what} has more cells than the first; put quotes around text that holds commas"
            yield QuestionFileError(path, line=line, reason=reason, unit=what)
            continue
        # Spreadsheet programs end lines in empty cells, also under no name.
        cells = {name: cell for name, cell in zip(columns, row, strict=False) if cell}
        yield _entry(path, line, cells if set(cells) == {"include"} else {"question": "", **cells}, unit=what)


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


def _yaml(path: Path, text: str) -> RawFile:
    root = _yaml_root(path, text)
    parts: dict[str, yaml.Node] = {}
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            if _name(key) in parts:
                raise QuestionFileError(path, line=_line(value), reason=f"'{_name(key)}:' stands a second time")
            parts[_name(key)] = value
    else:
        parts = {"questions": root} if root else {}
    questions, includes, variables = parts.get("questions"), parts.get("include"), parts.get("variables")
    if not isinstance(questions, yaml.SequenceNode) and (questions or not includes):
        reason = "it needs a list of questions, or a list under 'questions:'"
        raise QuestionFileError(path, line=_line(root) if root else None, reason=reason)
    if variables and not (isinstance(variables, yaml.MappingNode) and _all_text(variables)):
        raise QuestionFileError(path, line=_line(variables), reason="'variables:' needs a text for each name")
    included = includes.value if isinstance(includes, yaml.SequenceNode) else [includes] if includes else []
    entries = [
        RawEntry({"include": _plain(node)}, _place(path, _line(node)), path=path, line=_line(node)) for node in included
    ]
    title = parts.get("playbook") or parts.get("title")
    return RawFile(
        path,
        entries + [_yaml_entry(path, node) for node in (questions.value if questions else ())],
        title=title.value if isinstance(title, yaml.ScalarNode) else "",
        variables={_name(key): value.value for key, value in variables.value} if variables else {},
    )


def _yaml_entry(path: Path, node: yaml.Node) -> RawEntry:
    fault, line = _repeated_field(node), _line(node)
    marks = {}
    if isinstance(node, yaml.MappingNode):
        marks = {_name(key): (_line(value), value.start_mark.column + 1) for key, value in node.value}
    return RawEntry(_plain(node), _place(path, line), (fault,) if fault else (), path, line, marks)


def _all_text(node: yaml.MappingNode) -> bool:
    return all(isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode) for key, value in node.value)


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


def _entry(path: Path, line: int, value: Any, *, unit: str = "line") -> RawEntry:
    return RawEntry(value, _place(path, line, unit), path=path, line=line)


def _place(path: Path, line: int, unit: str = "line") -> str:
    return f"{path.name}, {unit} {line}"
