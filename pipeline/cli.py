"""The command line.

Imports inside the commands keep `platemaker --help` under half a second: database, queue and model libraries are
loaded by the commands that use them.
"""

import json
import logging
import os
import sys
import traceback
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pipeline import snapshot_cli
from pipeline.command import Json, opened
from pipeline.exits import Exit
from tasks.queues import Pool

if TYPE_CHECKING:
    from pydantic import ValidationError

    from pipeline.report.rows import ReportLine
    from pipeline.report.summary import Summary
    from storage.jobs import JobStatus

cli = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
database_cli = typer.Typer(no_args_is_help=True, help="The database.")
cli.add_typer(database_cli, name="db")
cli.add_typer(snapshot_cli.snapshots, name="snapshots")
cli.command()(snapshot_cli.sweep)
cli.command()(snapshot_cli.forget)


class AnswerFormat(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


Files = Annotated[list[Path], typer.Argument(help="Contracts: PDF, DOCX or text.", show_default=False)]
QuestionFiles = Annotated[
    list[Path], typer.Option("--questions", help="Question file: .yaml, .csv, .jsonl or .txt. May be repeated.")
]
ExtraQuestions = Annotated[list[str], typer.Option("-q", "--question", help="One more question. May be repeated.")]
MaxTokens = Annotated[int, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=5.0, help="0 is greedy: always the same answer.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1.0, help="Draw from the likeliest tokens that hold this share.")]
TopK = Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0: all.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same answers.")]
Stop = Annotated[list[str], typer.Option(help="End an answer before this text. May be repeated.")]
Title = Annotated[str, typer.Option(help="A name for the job, for people.")]
JobId = Annotated[str, typer.Argument(help="The id that submit printed.", show_default=False)]


def main() -> None:
    """Entry point: turns every known error into one sentence and its exit code."""
    from tomllib import TOMLDecodeError

    from pydantic import ValidationError

    from kernels.errors import KernelError
    from pipeline.errors import LocalServerError, PipelineError
    from storage.errors import (
        ArchiveRefused,
        DocumentUnknown,
        JobMissing,
        SettingsError,
        SnapshotInUse,
        SnapshotMissing,
        StorageError,
    )
    from tasks.errors import TaskError

    asked_wrong = (JobMissing, DocumentUnknown, SnapshotMissing, SnapshotInUse, ArchiveRefused, SettingsError)
    try:
        cli()
    except (StorageError, KernelError, TaskError, LocalServerError) as exc:
        _leave(Exit.USAGE if isinstance(exc, asked_wrong) else Exit.UNAVAILABLE, str(exc))
    except PipelineError as exc:
        _leave(Exit.USAGE, str(exc))
    except ValidationError as exc:
        _leave(Exit.USAGE, _settings_sentence(exc))
    except TOMLDecodeError as exc:
        _leave(Exit.USAGE, f"The settings file is not valid TOML: {exc}. Correct it, or set PLATEMAKER_CONFIG.")
    except OSError as exc:
        file = f"{exc.filename}: " if exc.filename else ""
        advice = "Free space there, give this user the right to write, or name another folder."
        _leave(Exit.UNAVAILABLE, f"{file}{exc.strerror or exc}. {advice} What is in the database is kept.")
    except KeyboardInterrupt:
        _leave(Exit.INTERRUPTED, "Stopped.")


def _leave(code: Exit, sentence: str) -> None:
    if logging.getLogger().isEnabledFor(logging.INFO):
        traceback.print_exc()
    Console(stderr=True).print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)


def _settings_sentence(exc: "ValidationError") -> str:
    parts = []
    for error in exc.errors(include_input=False, include_url=False):
        name = f"PLATEMAKER_{str(error['loc'][0]).upper()}: " if error["loc"] else ""
        parts.append(name + error["msg"].removeprefix("Value error, "))
    return f"A setting is wrong. {'; '.join(parts)}."


@cli.callback()
def prepare(
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Log what happens; show the cause of errors.")
    ] = False,
) -> None:
    """Ask many questions of many long documents: each is read once, and every answer comes from its stored KV cache."""
    level = logging.INFO if verbose else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not verbose:
        logging.getLogger("storage.patience").setLevel(logging.WARNING)  # what a person waits for
    file = Path(os.environ.get("PLATEMAKER_CONFIG") or "platemaker.toml")
    if file.is_file():
        from pipeline.settings import check_settings_file

        check_settings_file(file)


@cli.command(name="version")
def show_version() -> None:
    """Print the version."""
    typer.echo(version("platemaker"))


@cli.command()
def run(
    files: Files,
    questions: QuestionFiles = [],  # noqa: B006 # typer copies defaults
    question: ExtraQuestions = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder for answers.csv and answers.jsonl.")] = Path("review"),
    model: Annotated[str | None, typer.Option(help="Model folder, .gguf file or hub id.")] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    stop: Stop = [],  # noqa: B006
    title: Title = "",
    json_output: Json = False,
) -> None:
    """Answer questions about files here and now: no server, everything in this process."""
    from pipeline.questions import load_questions

    asked = load_questions(questions, question)
    _require_questions(len(asked))

    from kernels.cards import pin_cards
    from kernels.settings import KernelSettings

    kernel = KernelSettings(model=model) if model else KernelSettings()
    pin_cards(kernel.cards, kernel.tensor_parallel)

    from kernels.params import GenerationParams
    from pipeline.run import run_here  # only now: a wrong question file is told before torch is loaded
    from pipeline.settings import PipelineSettings
    from storage.settings import StorageSettings
    from tasks.settings import TaskSettings

    console = Console(stderr=json_output)
    finished = run_here(
        storage=StorageSettings(),
        kernel=kernel,
        task=TaskSettings().model_copy(update={"broker_url": None}),
        settings=PipelineSettings(),
        files=files,
        questions=asked,
        options=GenerationParams(max_tokens, temperature, top_p, top_k, seed, tuple(stop)),
        title=title,
        out=out,
        console=console,
    )
    if json_output:
        typer.echo(json.dumps(finished.summary.record()))
    if finished.interrupted:
        # Python cannot be torn down under a thread that is still inside the model; everything is written.
        sys.stdout.flush()
        os._exit(Exit.INTERRUPTED)
    raise typer.Exit(_exit_code(finished.summary))


@cli.command()
def submit(
    files: Files,
    questions: QuestionFiles = [],  # noqa: B006
    question: ExtraQuestions = [],  # noqa: B006
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    stop: Stop = [],  # noqa: B006
    title: Title = "",
    json_output: Json = False,
) -> None:
    """Hand a job to the workers and print its id."""
    from kernels.params import GenerationParams
    from kernels.settings import KernelSettings
    from pipeline import submit as submission
    from pipeline.questions import load_questions
    from pipeline.screen import counting
    from tasks.app import configure
    from tasks.errors import BrokerUnavailable
    from tasks.settings import TaskSettings
    from tasks.upkeep import kick_waiting

    asked = load_questions(questions, question)
    _require_questions(len(asked))
    task, kernel = TaskSettings(), KernelSettings()
    if task.broker_url is None:
        raise typer.BadParameter("submit needs workers: set PLATEMAKER_BROKER_URL, or use `platemaker run`.")
    submission.refuse_unsupported_model(kernel)
    errors = Console(stderr=True)
    with opened() as (database, store, settings), counting(errors, "Reading files", len(files)) as tick:
        made = submission.submit(
            database,
            store,
            settings=settings,
            model=kernel.model_name,
            files=files,
            questions=asked,
            options=GenerationParams(max_tokens, temperature, top_p, top_k, seed, tuple(stop)),
            title=title,
            on_read=tick,
        )
        try:
            kick_waiting(configure(task), database, task)
        except BrokerUnavailable as exc:
            errors.print(f"{exc} The job is safe: workers will find it.", style="yellow", highlight=False)
    if made.unreadable:
        errors.print(
            f"{made.unreadable} of {made.sources} files cannot be read; `platemaker answers {made.job_id}` says why.",
            style="yellow",
        )
    typer.echo(json.dumps(vars(made)) if json_output else made.job_id)
    raise typer.Exit(Exit.OK if made.documents else Exit.NOTHING_DONE)


@cli.command()
def status(job_id: JobId, json_output: Json = False) -> None:
    """Say how far a job is."""
    from storage.jobs import job_status

    with opened() as (database, _store, settings), database.reading() as session:
        found = job_status(session, settings.tenant, job_id)
    if json_output:
        typer.echo(json.dumps(_status_record(found)))
    else:
        Console().print(_status_line(found), highlight=False)


@cli.command()
def jobs(limit: Annotated[int, typer.Option(min=1, help="How many.")] = 20, json_output: Json = False) -> None:
    """List the newest jobs."""
    from storage.jobs import list_jobs

    with opened() as (database, _store, settings), database.reading() as session:
        found = list_jobs(session, settings.tenant, limit)
    for job in found:
        typer.echo(json.dumps(_status_record(job)) if json_output else _status_line(job))


@cli.command()
def watch(job_id: JobId, json_output: Json = False) -> None:
    """Show a job until it is done."""
    from pipeline.report.rows import report_lines
    from pipeline.report.summary import summarise
    from pipeline.report.table import print_summary
    from pipeline.screen import follow
    from storage.jobs import job_status

    console = Console()
    with opened() as (database, store, settings):
        with database.reading() as session:
            job_status(session, settings.tenant, job_id)
        follow(database, settings.tenant, job_id, console=console, json_lines=json_output)
        lines = list(report_lines(database, store, settings.tenant, job_id))
        summary = summarise(database, settings.tenant, job_id, lines)
    if json_output:
        typer.echo(json.dumps(summary.record()))
    else:
        print_summary(console, summary, ())
    raise typer.Exit(_exit_code(summary))


@cli.command()
def answers(
    job_id: JobId,
    answer_format: Annotated[AnswerFormat, typer.Option("--format", help="How to print them.")] = AnswerFormat.TABLE,
) -> None:
    """Print a job's answers, also while it runs: one row per file and question."""
    from pipeline.report.files import write_csv, write_jsonl
    from pipeline.report.rows import report_lines
    from pipeline.report.table import print_table

    with opened() as (database, store, settings):
        lines: list[ReportLine] = list(report_lines(database, store, settings.tenant, job_id))
    if answer_format == AnswerFormat.CSV:
        write_csv(lines, sys.stdout)
    elif answer_format == AnswerFormat.JSONL:
        write_jsonl(lines, sys.stdout)
    else:
        print_table(Console(), lines, most_rows=len(lines))


@cli.command()
def cancel(job_id: JobId, json_output: Json = False) -> None:
    """End a job. Finished answers are kept; with the workers down it works just as well."""
    from storage.database import utc_now
    from storage.jobs import cancel_job, job_status

    with opened() as (database, _store, settings):
        with database.writing() as session:
            cancel_job(session, settings.tenant, job_id, utc_now())
        with database.reading() as session:
            found = job_status(session, settings.tenant, job_id)
    typer.echo(json.dumps(_status_record(found)) if json_output else _status_line(found))


@cli.command()
def worker(
    pool: Annotated[Pool, typer.Argument(help="Which work it takes.", show_default=False)],
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Start a worker of a pool; stop it with Ctrl-C or SIGTERM."""
    from tasks.settings import TaskSettings

    task = TaskSettings()
    if task.broker_url is None:
        raise typer.BadParameter("a worker needs a broker: set PLATEMAKER_BROKER_URL.")

    from kernels.cards import pin_cards
    from kernels.settings import KernelSettings

    kernel = KernelSettings()
    pin_cards(kernel.cards, kernel.tensor_parallel)

    from pipeline.guard import check_no_other_kernels  # only now: a wrong setting is told before torch is loaded
    from storage.objects import check_store
    from storage.settings import StorageSettings
    from tasks.app import configure
    from tasks.worker import serve
    from tasks.workplace import Workplace

    check_no_other_kernels()
    place = Workplace.open(StorageSettings(), kernel, task)
    place.database.check_schema()
    check_store(place.store)
    _ = place.engine.model  # a worker whose model is wrong does not start
    serve(configure(task), place, pool, log_level=log_level)


@cli.command()
def doctor(json_output: Json = False) -> None:
    """Check database, store, broker, device and model by really using them."""
    from kernels.cards import pin_cards
    from kernels.settings import KernelSettings

    kernel = KernelSettings()
    pin_cards(kernel.cards, kernel.tensor_parallel)

    from pipeline.doctor import run_checks
    from storage.settings import StorageSettings
    from tasks.settings import TaskSettings

    healthy = True
    console = Console()
    for check in run_checks(StorageSettings(), kernel, TaskSettings()):
        healthy &= check.ok
        if json_output:
            typer.echo(json.dumps(vars(check)))
        else:
            mark, style = ("ok  ", "green") if check.ok else ("FAIL", "bold red")
            console.print(f"[{style}]{mark}[/] {check.name:9}", end=" ")
            console.print(f"{check.detail} ({check.seconds:.2f} s)", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(Exit.OK if healthy else Exit.UNAVAILABLE)


@database_cli.command()
def upgrade() -> None:
    """Create the tables, or bring them to this version."""
    from storage.database import Database
    from storage.settings import StorageSettings

    database = Database(StorageSettings())
    database.upgrade()
    database.close()
    typer.echo(f"{database.description}: schema is current")


def _require_questions(count: int) -> None:
    if not count:
        raise typer.BadParameter("no question: give --questions FILE or -q 'a question'.")


def _exit_code(summary: "Summary") -> Exit:
    if summary.cancelled:
        return Exit.CANCELLED
    if summary.answered == summary.rows:
        return Exit.OK
    return Exit.INCOMPLETE if summary.answered else Exit.NOTHING_DONE


def _status_line(job: "JobStatus") -> str:
    if job.finished_at is not None:
        state = "cancelled" if job.cancelled_at else "finished"
    else:
        state = "stopping" if job.cancelled_at else "running" if job.done else "waiting"
    counts = ", ".join(f"{count:,} {name.value}" for name, count in sorted(job.items.items()))
    bad = f"; {job.sources_failed} of {job.sources} files unreadable" if job.sources_failed else ""
    title = f" “{job.title}”" if job.title else ""
    return f"{job.job_id}{title} {state}: {job.done:,} of {job.total:,} done ({counts or 'no items'}){bad}"


def _status_record(job: "JobStatus") -> dict[str, object]:
    return {
        "job_id": job.job_id,
        "title": job.title,
        "model": job.model,
        "created_at": job.created_at.isoformat(),
        "finished_at": job.finished_at.isoformat() if job.finished_at else None,
        "cancelled_at": job.cancelled_at.isoformat() if job.cancelled_at else None,
        "sources": job.sources,
        "sources_failed": job.sources_failed,
        "questions": job.questions,
        "rows": job.rows,
        "items": {state.value: count for state, count in job.items.items()},
    }
