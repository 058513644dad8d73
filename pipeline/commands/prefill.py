"""`prefill`: snapshots before the questions come."""

import json
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.opening import kick, opened
from pipeline.commands.options import Files, Json
from pipeline.exits import Exit


def prefill(
    files: Files,
    title: Annotated[str, typer.Option(help="A name for the job, for people.")] = "prefill",
    json_output: Json = False,
) -> None:
    """Have the workers read documents now, so that later questions find their snapshots; print the job's id."""
    from kernels.params import GenerationParams
    from kernels.settings import KernelSettings
    from pipeline import submit as submission
    from pipeline.screen import counting

    kernel = KernelSettings()
    submission.refuse_unsupported_model(kernel)
    errors = Console(stderr=True)
    with opened() as (database, store, settings), counting(errors, "Reading files", len(files)) as tick:
        made = submission.submit(
            database,
            store,
            settings=settings,
            model=kernel.model_name,
            files=files,
            questions=[],
            options=GenerationParams(),
            title=title,
            only_prefill=True,
            on_read=tick,
        )
        kick(database)
    typer.echo(json.dumps(vars(made)) if json_output else made.job_id)
    raise typer.Exit(Exit.OK if made.documents else Exit.NOTHING_DONE)
