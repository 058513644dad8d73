"""Question files: YAML, CSV, JSONL or plain text, each entry with the line it stands on.

A file that cannot be read stops the submission; a single bad entry does not: it becomes a question with an error,
and so a column whose cells say why it was not asked.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import QuestionFileError

READABLE = (".yaml", ".yml", ".csv", ".jsonl", ".txt")


class QuestionEntry(BaseModel):
    """One entry of a question file. Numbers left out are the command's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)

    question: str
    id: str | None = Field(None, pattern=r"^[\w.-]+$", max_length=100)
    title: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=4096)
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """A question with its identity in the report; `error` says why it cannot be asked."""

    question_id: str
    title: str
    text: str
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    error_code: str | None = None
    error: str | None = None


class RawEntry(NamedTuple):
    value: Any
    place: str


def load_questions(files: Iterable[Path], extra: Iterable[str]) -> list[Question]:
    """The questions of all files in order, then those given on the command line.

    Raises:
        QuestionFileError: a file is missing, of another type, or not of its format; with the line.
    """
    entries = [entry for path in files for entry in _read(path)]
    entries += [RawEntry(text, f"question {index} of the command line") for index, text in enumerate(extra, 1)]
    questions: list[Question] = []
    places: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        question = _check(entry, number)
        if question.question_id in places:
            first = places[question.question_id]
            question = _refused(
                f"{question.question_id}#{number}",
                question.text,
                "duplicate_question",
                f"The id {question.question_id} at {entry.place} is already used at {first}; give one of them another.",
            )
        else:
            places[question.question_id] = entry.place
        questions.append(question)
    return questions


def _check(entry: RawEntry, number: int) -> Question:
    value = {"question": entry.value} if isinstance(entry.value, str) else entry.value
    if not isinstance(value, dict):
        return _refused(
            f"q{number}", "", "bad_question", f"The entry at {entry.place} is not a question; give text or fields."
        )
    value = {key: part for key, part in value.items() if part not in (None, "") or key == "question"}
    fallback_id = value["id"] if isinstance(value.get("id"), str) and value["id"] else f"q{number}"
    text = value.get("question")
    if text is None or (isinstance(text, str) and not text.strip()):
        return _refused(
            fallback_id, "", "empty_question", f"The question at {entry.place} is empty; write it or remove it."
        )
    try:
        checked = QuestionEntry.model_validate(value)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return _refused(
            fallback_id,
            str(text),
            "bad_question",
            f"The question at {entry.place} is wrong in {where}: {first['msg']}.",
        )
    question_id = checked.id or f"q{number}"
    return Question(
        question_id=question_id,
        title=checked.title or _title(checked.question),
        text=checked.question,
        max_tokens=checked.max_tokens,
        stop=checked.stop,
    )


def _refused(question_id: str, text: str, code: str, error: str) -> Question:
    return Question(question_id, _title(text) or question_id, text, error_code=code, error=error)


def _title(text: str) -> str:
    return text if len(text) <= 60 else text[:57].rstrip() + "…"


def _read(path: Path) -> list[RawEntry]:
    kind = path.suffix.lower()
    if kind not in READABLE:
        raise QuestionFileError(path, reason=f"questions are read from {', '.join(READABLE)}")
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError as exc:
        raise QuestionFileError(path, reason="the file does not exist") from exc
    except UnicodeDecodeError as exc:
        raise QuestionFileError(path, reason="the text is not UTF-8") from exc
    except OSError as exc:
        raise QuestionFileError(path, reason=f"it cannot be read ({exc.strerror})") from exc
    readers = {".csv": _csv, ".jsonl": _jsonl, ".txt": _text}
    entries = list(readers.get(kind, _yaml)(path, text))
    if not entries:
        raise QuestionFileError(path, reason="it holds no question")
    return entries


def _text(path: Path, text: str) -> Iterator[RawEntry]:
    for line, content in enumerate(text.splitlines(), 1):
        if content.strip() and not content.lstrip().startswith("#"):
            yield RawEntry(content.strip(), _place(path, line))


def _jsonl(path: Path, text: str) -> Iterator[RawEntry]:
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            yield RawEntry(json.loads(content), _place(path, line))
        except ValueError as exc:
            raise QuestionFileError(path, line=line, reason="this line is not JSON") from exc


def _csv(path: Path, text: str) -> Iterator[RawEntry]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, strict=True)
    if "question" not in (reader.fieldnames or ()):
        raise QuestionFileError(path, line=1, reason="the first line names the columns, and one must be 'question'")
    try:
        for row in reader:
            if None in row:
                raise QuestionFileError(path, line=reader.line_num, reason="this line has more cells than the first")
            yield RawEntry(dict(row), _place(path, reader.line_num))
    except csv.Error as exc:
        raise QuestionFileError(path, line=reader.line_num, reason=f"this line is not CSV ({exc})") from exc


def _yaml(path: Path, text: str) -> Iterator[RawEntry]:
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        nodes = _question_nodes(root)
        if nodes is None:
            line = root.start_mark.line + 1 if root is not None else None
            raise QuestionFileError(
                path, line=line, reason="it needs a list of questions, or a list under 'questions:'"
            )
        for node in nodes:
            yield RawEntry(loader.construct_object(node, deep=True), _place(path, node.start_mark.line + 1))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        problem = re.sub(r"\s+", " ", exc.problem or "it cannot be understood")
        raise QuestionFileError(
            path, line=mark.line + 1 if mark else None, reason=f"not valid YAML: {problem}"
        ) from exc
    except yaml.YAMLError as exc:
        raise QuestionFileError(path, reason="not valid YAML: it holds characters that YAML does not allow") from exc


def _question_nodes(root: yaml.Node | None) -> list[yaml.Node] | None:
    if isinstance(root, yaml.MappingNode):
        found = [value for key, value in root.value if key.value == "questions"]
        root = found[0] if found else None
    return root.value if isinstance(root, yaml.SequenceNode) else None


def _place(path: Path, line: int) -> str:
    return f"{path.name}, line {line}"
