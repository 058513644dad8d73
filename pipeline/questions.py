"""The questions of a job.

A file that cannot be read stops the submission; a single bad entry does not: it becomes a question with an error,
and so a column whose cells say why it was not asked.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from kernels.errors import ConstraintRefused, ParamsRefused
from kernels.grammar import grammar_of
from kernels.params import GenerationParams
from pipeline.playbooks.answer_types import AnswerSpec, AnswerType
from pipeline.playbooks.entries import Expansion
from pipeline.playbooks.prompt import TEMPLATE, not_found_words, question_prompt
from pipeline.question_files import RawEntry

_ID = re.compile(r"[\w.-]{1,100}")
_LONGEST_TITLE = 60


def _identifier(text: str) -> str:
    if not _ID.fullmatch(text):
        raise ValueError("use up to 100 letters, digits, '.', '-' and '_'")
    return text


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL character is not text")  # PostgreSQL stores none
    return text


def _not_a_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("give a number")  # pydantic takes true for 1
    return value


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _type_name(value: Any) -> Any:
    return re.sub(r"[/ -]", "_", value.strip().lower()) if isinstance(value, str) else value


def _split(value: Any) -> Any:
    """A cell of a table holds a list as "Yes|No"."""
    return tuple(choice.strip() for choice in value.split("|")) if isinstance(value, str) else value


def _schema_text(value: Any) -> Any:
    """A schema is given as an object, or as text where a file knows only text."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def _checked(**constraint: Any) -> GenerationParams:
    try:
        return GenerationParams.checked(**constraint)
    except ParamsRefused as exc:
        raise ValueError(str(exc)) from exc


def _enforceable(name: str) -> AfterValidator:
    """Refuses a constraint that no answer can be held to."""

    def check(value: Any) -> Any:
        try:
            grammar_of(_checked(**{name: value}))
        except ConstraintRefused as exc:
            raise ValueError(exc.reason) from exc
        return value

    return AfterValidator(check)


_Text = Annotated[str, AfterValidator(_without_nul)]
# Blanks and line ends are meant; an empty one would end every answer before it begins.
_Stop = Annotated[str, StringConstraints(strip_whitespace=False, min_length=1), AfterValidator(_without_nul)]


_Choice = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), AfterValidator(_without_nul)]
_Pattern = Annotated[str, StringConstraints(strip_whitespace=False, max_length=10_000), AfterValidator(_without_nul)]


class QuestionEntry(BaseModel):
    """One entry of a question file. Numbers left out are the command's own.

    `choices`, `regex` and `json_schema` constrain the answer; see GenerationParams. With a `type`, the model is told
    what is wanted as well, and may always say that it was not found.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)

    question: _Text
    id: Annotated[str, AfterValidator(_identifier)] | None = None
    title: _Text | None = None
    type: Annotated[AnswerType, BeforeValidator(_type_name)] | None = None
    guidance: _Text | None = None
    quote: bool = False
    max_tokens: Annotated[int, BeforeValidator(_not_a_switch), Field(ge=1, le=4096)] | None = None
    stop: Annotated[tuple[_Stop, ...], BeforeValidator(_listed)] = ()
    choices: Annotated[tuple[_Choice, ...], BeforeValidator(_split), Field(min_length=1, max_length=1000)] = ()
    regex: Annotated[_Pattern, _enforceable("regex")] | None = None
    json_schema: (
        Annotated[_Text, BeforeValidator(_schema_text), Field(max_length=100_000), _enforceable("json_schema")] | None
    ) = None

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        _checked(stop=self.stop, choices=self.choices, regex=self.regex, json_schema=self.json_schema)
        return self

    @model_validator(mode="after")
    def _choices_belong(self) -> "QuestionEntry":
        if (self.type == AnswerType.CHOICE and not self.choices) or (
            self.choices and self.type not in (AnswerType.CHOICE, None)
        ):
            raise ValueError("'type: choice' and 'choices' belong together")
        return self

    @property
    def answer_type(self) -> AnswerType:
        if self.type is not None:
            return self.type
        return AnswerType.CHOICE if self.choices else AnswerType.JSON if self.json_schema else AnswerType.TEXT


@dataclass(frozen=True)
class Question:
    """A question with its identity in the report; `error` says why it cannot be asked.

    `text` is what the model is asked, `asked` what the entry asks, where the two differ.
    """

    question_id: str
    title: str
    text: str
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    regex: str | None = None
    json_schema: str | None = None
    error_code: str | None = None
    error: str | None = None
    answer_type: AnswerType = AnswerType.TEXT
    guidance: str | None = None
    quote: bool = False
    asked: str | None = None

    @property
    def spec(self) -> AnswerSpec:
        template = TEMPLATE if self.asked else None
        return AnswerSpec(self.answer_type, self.choices, self.quote, self.asked, template)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a question file, as a sentence, and where."""

    sentence: str
    path: Path | None = None
    line: int | None = None
    column: int | None = None


@dataclass(frozen=True)
class QuestionSet:
    """Questions as read, what is wrong with them, and the given variables that no question uses."""

    questions: list[Question]
    problems: list[Problem]
    unused: list[str]


def load_questions(
    files: Iterable[Path], extra: Iterable[str], values: Mapping[str, str] | None = None
) -> list[Question]:
    """The questions of all files in order, then those given on the command line; no two have one id.

    A name of a built-in playbook stands for its file. `values` are those of variables in files.

    Raises:
        QuestionFileError: a file is missing, of another type, or not of its format; with the line.
    """
    found = load_question_set(files, extra, values)
    return found.questions


def load_question_set(
    files: Iterable[Path], extra: Iterable[str], values: Mapping[str, str] | None = None
) -> QuestionSet:
    """As `load_questions`, with everything that is wrong.

    Raises:
        QuestionFileError: a file cannot be read at all.
    """
    values = values or {}
    expansion = Expansion(values)
    entries = [entry for path in files for entry in expansion.entries(path)]
    entries += [RawEntry(text, f"question {index} of the command line") for index, text in enumerate(extra, 1)]
    questions: list[Question] = []
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        question, wrong = _check(entry, number)
        problems += wrong
        question_id = question.question_id
        if question_id in places:
            error = (
                f"The id {question_id} at {entry.place} is already used at {places[question_id]}; "
                "give one of them another."
            )
            problems.append(_problem(entry, error, "id"))
            # No entry's own id holds a #.
            question = _refused(f"{question_id}#{number}", question.text, "duplicate_question", error)
        places.setdefault(question_id, entry.place)
        questions.append(question)
    return QuestionSet(questions, problems, sorted(values.keys() - expansion.used))


def _check(entry: RawEntry, number: int) -> tuple[Question, list[Problem]]:
    value = {"question": entry.value} if isinstance(entry.value, str) else entry.value

    def refused(question_id: str, text: str, code: str, wrong: list[Problem]) -> tuple[Question, list[Problem]]:
        error = " ".join(problem.sentence for problem in wrong)
        return _refused(question_id, text, code, error), wrong

    if not isinstance(value, dict):
        error = f"The entry at {entry.place} is not a question; give text or fields."
        return refused(f"q{number}", "", "bad_question", [_problem(entry, error)])
    value = {name: part for name, part in value.items() if part is not None and part != ""}
    own_id, text = value.get("id"), value.get("question", "")
    question_id = own_id if isinstance(own_id, str) and _ID.fullmatch(own_id) else f"q{number}"
    if not isinstance(text, str):
        text = ""
    elif not text.strip():
        error = f"The question at {entry.place} is empty; write it or remove it."
        return refused(question_id, "", "empty_question", [_problem(entry, error, "question")])
    wrong = [_problem(entry, f"The question at {entry.place} {fault}.") for fault in entry.faults]
    checked: QuestionEntry | None = None
    try:
        checked = QuestionEntry.model_validate(value)
    except ValidationError as exc:
        for field, what in _what_is_wrong(exc):
            wrong.append(_problem(entry, f"The question at {entry.place} {what}.", field))
    if checked is None or wrong:
        return refused(question_id, text, "bad_question", wrong)
    prompt = question_prompt(
        checked.question,
        title=checked.title,
        guidance=checked.guidance,
        answer_type=checked.type or AnswerType.TEXT,
        choices=checked.choices,
    )
    question = Question(
        question_id=checked.id or question_id,
        title=checked.title or _title(checked.question),
        text=prompt,
        max_tokens=checked.max_tokens,
        stop=checked.stop,
        answer_type=checked.answer_type,
        choices=checked.choices + ((not_found_words(checked.question),) if checked.type == AnswerType.CHOICE else ()),
        guidance=checked.guidance,
        quote=checked.quote,
        asked=checked.question if prompt != checked.question else None,
        regex=checked.regex,
        json_schema=checked.json_schema,
    )
    return question, []


def _problem(entry: RawEntry, sentence: str, field: str = "") -> Problem:
    line, column = entry.marks.get(field, (entry.line, None))
    return Problem(_storable(sentence), entry.path, line, column)


def _what_is_wrong(exc: ValidationError) -> list[tuple[str, str]]:
    """Fields with what is wrong in them."""
    found = []
    for error in exc.errors(include_url=False, include_input=False):
        name = str(error["loc"][0]) if error["loc"] else ""
        field = _title(".".join(map(str, error["loc"]))) or "its fields"
        if error["type"] == "extra_forbidden":
            what = f"has the unknown field {field}; there are {', '.join(QuestionEntry.model_fields)}"
        else:
            what = f"is wrong in {field}: {error['msg'].removeprefix('Value error, ')}"
        found.append((name, what))
    return found


def _refused(question_id: str, text: str, code: str, error: str) -> Question:
    text = _storable(text)
    return Question(question_id, _title(text) or question_id, text, error_code=code, error=_storable(error))


def _storable(text: str) -> str:
    """Without what no database takes: NUL, and the halves of characters that JSON and file names can hold."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def _title(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_TITLE else text[: _LONGEST_TITLE - 3].rstrip() + "…"
