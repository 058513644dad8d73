"""`submit`: a job for the workers."""

import json

import typer
from rich.console import Console

from pipeline.commands.estimate import tell_estimate
from pipeline.commands.opening import kick, opened
from pipeline.commands.options import Files, JobOptions, Json, QuestionOptions, taking
from pipeline.exits import Exit


@taking(QuestionOptions, JobOptions)
def submit(
    asking: QuestionOptions,
    job: JobOptions,
    *,
    files: Files,
    json_output: Json = False,
) -> None:
    """Hand a job to the workers and print its id."""
    from kernels.settings import KernelSettings
    from pipeline import submit as submission
    from pipeline.screen import counting
    from tasks.settings import TaskSettings

    asked = asking.load()
    times = job.times()
    task, kernel = TaskSettings(), KernelSettings()
    if job.dry_run:
        tell_estimate(kernel, files, asked, make_tables=False, json_output=json_output)
        return
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
            options=asking.params(),
            title=job.title,
            client_key=job.key,
            times=times,
            on_read=tick,
        )
        kick(database)
    if made.unreadable:
        errors.print(
            f"{made.unreadable} of {made.sources} files cannot be read; `platemaker answers {made.job_id}` says why.",
            style="yellow",
        )
    typer.echo(json.dumps(vars(made)) if json_output else made.job_id)
    raise typer.Exit(Exit.OK if made.documents else Exit.NOTHING_DONE)
