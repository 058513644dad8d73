"""Options that several commands have, and the sets of them that commands share."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pipeline.documents import Normalise, ReadOptions, Split, Tracked
from storage.tiers import Tier

if TYPE_CHECKING:
    from kernels.params import GenerationParams
    from pipeline.questions import Question
    from storage.jobs import JobTimes

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JobId = Annotated[str, typer.Argument(help="The id that submit printed.", show_default=False)]
Title = Annotated[str, typer.Option(help="A name for the job, for people.")]
Files = Annotated[
    list[str],
    typer.Argument(
        help="Contracts (PDF, DOCX, text, HTML, e-mail): files, folders, patterns, ZIP archives, s3:// prefixes.",
        show_default=False,
    ),
]
TierOption = Annotated[Tier, typer.Option("--tier", help="fast: taken first, in small batches; batch: in large ones.")]
SplitLong = Annotated[
    Split,
    typer.Option(
        "--split",
        help="A document longer than the model's context is refused, or read in overlapping sections and their answers "
        "merged.",
    ),
]
SET_HELP = "Value of a playbook's variable: --set party='the Supplier'. Repeatable."


def variables(given: list[str]) -> dict[str, str]:
    """
    Raises:
        BadParameter: one is not NAME=VALUE.
    """
    values = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"--set needs NAME=VALUE, not {pair}.")
        values[name] = value
    return values


class QuestionOptions(NamedTuple):
    """What is asked, and how answers are generated."""

    questions: Annotated[
        list[Path],
        typer.Option(
            "--questions", help="Playbook: a .yaml, .csv, .xlsx, .jsonl or .txt file, or cuad or nda. Repeatable."
        ),
    ] = []  # noqa: RUF012 # typer copies it
    set: Annotated[list[str], typer.Option("--set", help=SET_HELP)] = []  # noqa: RUF012 # typer copies it
    question: Annotated[list[str], typer.Option("-q", "--question", help="One more question. May be repeated.")] = []  # noqa: RUF012 # typer copies it
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")] = 64
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0, help="0 is greedy: always the same answer.")] = 0.0
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Draw from the likeliest tokens that hold this share.")
    ] = 1.0
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0: all.")] = 0
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out tokens less likely than this share of the likeliest.")
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(
            min=0.01, max=10.0, help="Above 1: tokens of the question and the answer so far become less likely."
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option(help="The same seed draws the same answers.")] = 0
    stop: Annotated[list[str], typer.Option(help="End an answer before this text. May be repeated.")] = []  # noqa: RUF012 # typer copies it
    stop_token_id: Annotated[
        list[int], typer.Option(min=0, help="End an answer before this token. May be repeated.")
    ] = []  # noqa: RUF012 # typer copies it
    min_tokens: Annotated[
        int, typer.Option(min=0, max=4096, help="An answer does not end before it has so many tokens.")
    ] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model would end its answer.")] = (
        False
    )
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0, max=20, help="Keep each token's log-probability, and so many of the likeliest, in answers.jsonl."
        ),
    ] = None

    quotes: Annotated[
        bool, typer.Option("--quotes", help="Let the model quote the document for every answer, not only where asked.")
    ] = False

    def load(self) -> "list[Question]":
        """
        Raises:
            QuestionFileError: a file cannot be read.
            BadParameter: nothing is asked.
        """
        from pipeline.questions import load_question_set

        asked = load_question_set(self.questions, self.question, variables(self.set))
        if not asked.questions:
            raise typer.BadParameter("no question: give --questions FILE or -q 'a question'.")
        if asked.unused:
            raise typer.BadParameter(f"no question uses {{{asked.unused[0]}}}; leave out --set {asked.unused[0]}=….")
        return asked.questions

    def params(self) -> "GenerationParams":
        """
        Raises:
            BadParameter: options contradict each other.
        """
        from kernels.errors import ParamsRefused
        from kernels.params import GenerationParams

        try:
            return GenerationParams.checked(
                max_new_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                seed=self.seed,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_id),
                min_new_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                logprobs=self.logprobs,
                quote=self.quotes,
            )
        except ParamsRefused as exc:
            sentence = str(exc).replace("min_new_tokens", "--min-tokens").replace("max_new_tokens", "--max-tokens")
            raise typer.BadParameter(f"{sentence}.") from exc


class ReadingOptions(NamedTuple):
    """How files are read."""

    tracked: Annotated[Tracked, typer.Option(help="What becomes of tracked changes in Word files.")] = Tracked.ACCEPT
    comments: Annotated[bool, typer.Option("--comments", help="Read the comments of Word files too.")] = False
    normalise: Annotated[
        Normalise, typer.Option(help="furniture: leave out repeating page heads and feet, page numbers, blank lines.")
    ] = Normalise.PLAIN
    ocr: Annotated[bool, typer.Option("--ocr", help="Recognise the text of scanned pages (extra `ocr`).")] = False

    def read_options(self) -> ReadOptions:
        return ReadOptions(self.tracked, self.comments, self.normalise, self.ocr)


class JobOptions(NamedTuple):
    """When a job is worked on, and what it is called."""

    title: Title = ""
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
