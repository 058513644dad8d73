"""`run`: everything in this process."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.estimate import tell_estimate
from pipeline.commands.opening import device_settings
from pipeline.commands.options import Files, JobOptions, Json, QuestionOptions, ReadingOptions, SplitLong, taking
from pipeline.documents import Split
from pipeline.exits import Exit, exit_code


@taking(QuestionOptions, ReadingOptions, JobOptions)
def run(
    asking: QuestionOptions,
    reading: ReadingOptions,
    job: JobOptions,
    *,
    files: Files,
    out: Annotated[
        Path, typer.Option(help="A file (.xlsx, .html, .csv, .jsonl, .md), or a folder for the first four.")
    ] = Path("review"),
    model: Annotated[str | None, typer.Option(help="Model folder, .gguf file or hub id.")] = None,
    split: SplitLong = Split.REFUSE,
    json_output: Json = False,
) -> None:
    """Answer questions about files here and now: no server, everything in this process."""
    asked, options, times, kernel = asking.load(), asking.params(), job.times(), device_settings(model)
    console = Console(stderr=json_output)
    if job.dry_run:
        from pipeline.splitting import splitter

        cutting = splitter(split, kernel, asked, options)
        tell_estimate(kernel, files, asked, reading.read_options(), cutting, make_tables=True, json_output=json_output)
        return

    from pipeline.run import run_here  # only now: what is wrong so far is told before torch is loaded
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
        options=options,
        reading=reading.read_options(),
        split=split,
        title=job.title,
        client_key=job.key,
        times=times,
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
