"""Options that several commands have, and the sets of them that commands share."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from kernels.params import GenerationParams
    from pipeline.questions import Question
    from storage.jobs import JobTimes

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JobId = Annotated[str, typer.Argument(help="The id that submit printed.", show_default=False)]
Files = Annotated[list[Path], typer.Argument(help="Contracts: PDF, DOCX or text.", show_default=False)]


class QuestionOptions(NamedTuple):
    """What is asked, and how answers are generated."""

    questions: Annotated[
        list[Path], typer.Option("--questions", help="Question file: .yaml, .csv, .jsonl or .txt. May be repeated.")
    ] = []  # noqa: RUF012 # typer copies it
    question: Annotated[list[str], typer.Option("-q", "--question", help="One more question. May be repeated.")] = []  # noqa: RUF012 # typer copies it
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")] = 64
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0, help="0 is greedy: always the same answer.")] = 0.0
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Draw from the likeliest tokens that hold this share.")
    ] = 1.0
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0: all.")] = 0
    seed: Annotated[int, typer.Option(help="The same seed draws the same answers.")] = 0
    stop: Annotated[list[str], typer.Option(help="End an answer before this text. May be repeated.")] = []  # noqa: RUF012 # typer copies it

    def load(self) -> "list[Question]":
        """
        Raises:
            QuestionFileError: a file cannot be read.
            BadParameter: nothing is asked.
        """
        from pipeline.questions import load_questions

        asked = load_questions(self.questions, self.question)
        if not asked:
            raise typer.BadParameter("no question: give --questions FILE or -q 'a question'.")
        return asked

    def params(self) -> "GenerationParams":
        from kernels.params import GenerationParams

        return GenerationParams(self.max_tokens, self.temperature, self.top_p, self.top_k, self.seed, tuple(self.stop))


class JobOptions(NamedTuple):
    """When a job is worked on, and what it is called."""

    title: Annotated[str, typer.Option(help="A name for the job, for people.")] = ""
    key: Annotated[
        str | None, typer.Option(help="Your own name for this job: given again with the same content, nothing is made.")
    ] = None
    not_before: Annotated[
        str | None, typer.Option(metavar="TIME", help="Begin then, not before: 2026-12-01T22:00, or 2h from now.")
    ] = None
    answer_by: Annotated[
        str | None, typer.Option(metavar="TIME", help="What is not answered by then, expires: a time, or 6h from now.")
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take (tokens, time, cost), and queue nothing.")
    ] = False

    def times(self) -> "JobTimes":
        """
        Raises:
            TimeUnclear: one of them cannot be read.
            BadParameter: they leave no time.
        """
        from pipeline.times import parse_when
        from storage.database import utc_now
        from storage.jobs import JobTimes

        now = utc_now()
        begin = None if self.not_before is None else parse_when(self.not_before, now)
        end = None if self.answer_by is None else parse_when(self.answer_by, now)
        if end is not None and end <= max(now, begin or now):
            raise typer.BadParameter("--answer-by must lie in the future, and behind --not-before.")
        return JobTimes(not_before=begin, answer_by=end)


def taking(*sets: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options that are the fields of NamedTuples, behind those of its own without a default.

    The command gets one instance of each class, in this order, as its first arguments.
    """
    fields = {kind: list(inspect.signature(kind, eval_str=True).parameters.values()) for kind in sets}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(sets) :]
        shared = [field for kind in sets for field in fields[kind]]
        required = [parameter for parameter in own if parameter.default is inspect.Parameter.empty]
        optional = [parameter for parameter in own if parameter.default is not inspect.Parameter.empty]
        given = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*required, *shared, *optional)]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            filled = [kind(**{field.name: values.pop(field.name) for field in fields[kind]}) for kind in sets]
            command(*filled, **values)

        run.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined] # typer reads it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in given}
        return run

    return decorate
