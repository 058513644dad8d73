"""`submit`: a job for the workers."""

import json
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from pipeline.commands.estimate import tell_estimate
from pipeline.commands.opening import kick, opened, traced
from pipeline.commands.options import (
    Files,
    JobOptions,
    Json,
    QuestionOptions,
    ReadingOptions,
    SplitLong,
    TierOption,
    taking,
)
from pipeline.documents import Split
from pipeline.exits import Exit
from storage.tiers import Tier
from storage.ways import Mode

if TYPE_CHECKING:
    from kernels.settings import KernelSettings
    from pipeline.submit import Submission


@taking(QuestionOptions, ReadingOptions, JobOptions)
def submit(
    asking: QuestionOptions,
    reading: ReadingOptions,
    job: JobOptions,
    *,
    files: Files,
    tier: TierOption = Tier.BATCH,
    mode: Annotated[
        Mode | None,
        typer.Option(help="How this job's documents come to their answers. Default: as PLATEMAKER_MODE says."),
    ] = None,
    split: SplitLong = Split.REFUSE,
    json_output: Json = False,
) -> None:
    """Hand a job to the workers and print its id."""
    from kernels.settings import KernelSettings
    from pipeline.splitting import splitter
    from tasks.settings import TaskSettings

    asked, options, times = asking.load(), asking.params(), job.times()
    task, kernel = TaskSettings(), KernelSettings()
    cutting = splitter(split, kernel, asked, options)
    if job.dry_run:
        tell_estimate(kernel, files, asked, reading.read_options(), cutting, make_tables=False, json_output=json_output)
        return
    if task.broker_url is None:
        raise typer.BadParameter("submit needs workers: set PLATEMAKER_BROKER_URL, or use `platemaker run`.")
    hand_over(
        kernel,
        files,
        json_output=json_output,
        questions=asked,
        options=options,
        reading=reading.read_options(),
        title=job.title,
        client_key=job.key,
        times=times,
        tier=tier,
        mode=mode,
        splitter=cutting,
    )


def hand_over(kernel: "KernelSettings", files: list[str], *, json_output: bool, **job: Any) -> NoReturn:
    """Submits what `job` says, as `pipeline.submit.submit` takes it, about these files, and ends the command."""
    from pipeline.screen import counting
    from pipeline.settings import PipelineSettings
    from pipeline.submit import named_sources, refuse_unsupported_model, submit
    from storage.settings import StorageSettings

    refuse_unsupported_model(kernel)
    storage = StorageSettings()
    sources = named_sources(files, PipelineSettings(), storage)
    screen = Console(stderr=True)
    with traced():
        with opened() as (database, store, settings), counting(screen, "Reading files", len(sources)) as tick:
            made = submit(
                database,
                store,
                settings=settings,
                model=kernel.model_name,
                files=sources,
                limits=storage.limits,
                on_read=tick,
                **job,
            )
            kick(database, first=made.job_id)
        _tell(made, json_output=json_output)


def _tell(made: "Submission", *, json_output: bool) -> NoReturn:
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
