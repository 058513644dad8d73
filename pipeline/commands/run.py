"""`run`: everything in this process."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.estimate import tell_estimate
from pipeline.commands.options import Files, JobOptions, Json, QuestionOptions, taking
from pipeline.exits import Exit, exit_code


@taking(QuestionOptions, JobOptions)
def run(
    asking: QuestionOptions,
    job: JobOptions,
    *,
    files: Files,
    out: Annotated[Path, typer.Option(help="Folder for answers.csv and answers.jsonl.")] = Path("review"),
    model: Annotated[str | None, typer.Option(help="Model folder, .gguf file or hub id.")] = None,
    json_output: Json = False,
) -> None:
    """Answer questions about files here and now: no server, everything in this process."""
    asked = asking.load()

    from kernels.settings import KernelSettings  # only now: a wrong question file is told before torch is loaded

    console = Console(stderr=json_output)
    kernel = KernelSettings(model=model) if model else KernelSettings()
    if job.dry_run:
        tell_estimate(kernel, files, asked, make_tables=True, json_output=json_output)
        return
    from pipeline.run import run_here
    from pipeline.settings import PipelineSettings
    from storage.settings import StorageSettings
    from tasks.settings import TaskSettings

    finished = run_here(
        storage=StorageSettings(),
        kernel=kernel,
        task=TaskSettings().model_copy(update={"broker_url": None}),
        settings=PipelineSettings(),
        files=files,
        questions=asked,
        options=asking.params(),
        title=job.title,
        client_key=job.key,
        times=job.times(),
        out=out,
        console=console,
    )
    if json_output:
        typer.echo(json.dumps(finished.summary.record()))
    if finished.interrupted:
        # Python cannot be torn down under a thread that is still inside the model; everything is written.
        sys.stdout.flush()
        os._exit(Exit.INTERRUPTED)
    raise typer.Exit(exit_code(finished.summary))
