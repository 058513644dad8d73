"""`submit`: a job for the workers."""

import json

import typer
from rich.console import Console

from pipeline.commands.opening import opened
from pipeline.commands.options import Files, Json, QuestionOptions, ReadingOptions, Title, taking
from pipeline.exits import Exit


@taking(QuestionOptions, ReadingOptions)
def submit(
    asking: QuestionOptions,
    reading: ReadingOptions,
    *,
    files: Files,
    title: Title = "",
    json_output: Json = False,
) -> None:
    """Hand a job to the workers and print its id."""
    from kernels.settings import KernelSettings
    from pipeline import submit as submission
    from pipeline.screen import counting
    from pipeline.settings import PipelineSettings
    from storage.settings import StorageSettings
    from tasks.app import configure
    from tasks.errors import BrokerUnavailable
    from tasks.settings import TaskSettings
    from tasks.upkeep import kick_waiting

    asked = asking.load()
    task, kernel = TaskSettings(), KernelSettings()
    if task.broker_url is None:
        raise typer.BadParameter("submit needs workers: set PLATEMAKER_BROKER_URL, or use `platemaker run`.")
    submission.refuse_unsupported_model(kernel)
    errors = Console(stderr=True)
    sources = submission.named_sources(files, PipelineSettings(), StorageSettings())
    with opened() as (database, store, settings), counting(errors, "Reading files", len(sources)) as tick:
        made = submission.submit(
            database,
            store,
            settings=settings,
            model=kernel.model_name,
            files=sources,
            questions=asked,
            options=asking.params(),
            reading=reading.read_options(),
            title=title,
            on_read=tick,
        )
        try:
            kick_waiting(configure(task), database, task)
        except BrokerUnavailable as exc:
            errors.print(f"{exc} The job is safe: workers will find it.", style="yellow", highlight=False)
    for note in made.notes:
        errors.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if made.unreadable:
        errors.print(
            f"{made.unreadable} of {made.sources} files cannot be read; `platemaker answers {made.job_id}` says why.",
            style="yellow",
        )
    typer.echo(json.dumps(vars(made)) if json_output else made.job_id)
    raise typer.Exit(Exit.OK if made.documents else Exit.NOTHING_DONE)
