"""`submit`: a job for the workers."""

import json
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from pipeline.commands.estimate import tell_estimate
from pipeline.commands.opening import kick, opened
from pipeline.commands.options import Files, JobOptions, Json, QuestionOptions, ReadingOptions, taking
from pipeline.exits import Exit

if TYPE_CHECKING:
    from pipeline.submit import Submission


@taking(QuestionOptions, ReadingOptions, JobOptions)
def submit(
    asking: QuestionOptions,
    reading: ReadingOptions,
    job: JobOptions,
    *,
    files: Files,
    json_output: Json = False,
) -> None:
    """Hand a job to the workers and print its id."""
    from kernels.settings import KernelSettings
    from pipeline import submit as submission
    from pipeline.screen import counting
    from pipeline.settings import PipelineSettings
    from storage.settings import StorageSettings
    from tasks.settings import TaskSettings

    asked, options, times = asking.load(), asking.params(), job.times()
    task, kernel = TaskSettings(), KernelSettings()
    if job.dry_run:
        tell_estimate(kernel, files, asked, reading.read_options(), make_tables=False, json_output=json_output)
        return
    if task.broker_url is None:
        raise typer.BadParameter("submit needs workers: set PLATEMAKER_BROKER_URL, or use `platemaker run`.")
    submission.refuse_unsupported_model(kernel)
    sources = submission.named_sources(files, PipelineSettings(), StorageSettings())
    screen = Console(stderr=True)
    with opened() as (database, store, settings), counting(screen, "Reading files", len(sources)) as tick:
        made = submission.submit(
            database,
            store,
            settings=settings,
            model=kernel.model_name,
            files=sources,
            questions=asked,
            options=options,
            reading=reading.read_options(),
            title=job.title,
            client_key=job.key,
            times=times,
            on_read=tick,
        )
        kick(database)
    tell_submission(made, json_output=json_output)


def tell_submission(made: "Submission", *, json_output: bool) -> NoReturn:
    """Says what was submitted and what could not be read, and ends the command."""
    errors = Console(stderr=True)
    for note in made.notes:
        errors.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if made.unreadable:
        errors.print(
            f"{made.unreadable} of {made.sources} files cannot be read; `platemaker answers {made.job_id}` says why.",
            style="yellow",
        )
    typer.echo(json.dumps(vars(made)) if json_output else made.job_id)
    raise typer.Exit(Exit.OK if made.documents else Exit.NOTHING_DONE)
