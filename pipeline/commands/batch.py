"""Files of OpenAI's Batch API."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.opening import device_settings
from pipeline.commands.options import Json
from pipeline.exits import Exit


def run_batch(
    *,
    file: Annotated[Path, typer.Option("-i", "--input", help="Batch file (.jsonl) of chat completions.")],
    out: Annotated[Path, typer.Option("-o", "--output", help="Answers (.jsonl), in the order of the input.")],
    errors: Annotated[
        Path | None, typer.Option(help="Lines without an answer go to this file; else they stand among the answers.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of lines that name none, in tokens.")] = 512,
    model: Annotated[str | None, typer.Option(help="Model folder, .gguf file or hub id.")] = None,
    json_output: Json = False,
) -> None:
    """Answer a file made for OpenAI's Batch API here, with one prefill for the lines that begin alike."""
    kernel = device_settings(model)

    from pipeline.batch.answer import Counts
    from pipeline.batch.run import run_batch as answer
    from pipeline.settings import PipelineSettings
    from storage.settings import StorageSettings
    from tasks.settings import TaskSettings

    console = Console(stderr=True)
    total = 0

    def indexed(lines: int) -> None:
        nonlocal total
        total = lines
        console.print(f"{lines} lines", highlight=False)

    def told(counts: Counts) -> None:
        ended = counts.found_done + counts.answered + counts.failed
        if console.is_terminal or ended % max(1, total // 20) == 0 or ended == total:
            console.print(
                f"Answered {ended:,} of {total:,}", highlight=False, end="\r" if console.is_terminal else "\n"
            )

    done = answer(
        file,
        out,
        errors,
        storage=StorageSettings(),
        kernel=kernel,
        task=TaskSettings().model_copy(update={"broker_url": None}),
        settings=PipelineSettings(),
        max_tokens=max_tokens,
        on_indexed=indexed,
        on_done=told,
    )
    counts = done.counts
    if json_output:
        typer.echo(json.dumps({"lines": done.lines, "failed": done.failed, **asdict(counts)}))
    else:
        console.print(
            f"{done.lines - done.failed:,} of {done.lines:,} lines answered, {counts.found_done:,} of all found done. "
            f"{counts.prompt_tokens:,} prompt tokens, {counts.computed_tokens:,} computed, in {counts.groups:,} groups "
            f"that begin alike. Written to {out}.",
            highlight=False,
            soft_wrap=True,
        )
    if done.failed:
        raise typer.Exit(Exit.INCOMPLETE if done.failed < done.lines else Exit.NOTHING_DONE)


def import_questions(
    file: Annotated[Path, typer.Argument(help="Batch file (.jsonl) of chat completions.")],
    *,
    out: Annotated[Path, typer.Option("-o", "--output", help="Playbook to write (.yaml).")],
) -> None:
    """Make a playbook of the questions that a batch file asks about its documents."""
    from pipeline.batch.questions import write_playbook

    made = write_playbook(file, out)
    typer.echo(f"{made.questions} questions of {made.groups} documents, written to {out}.")
    if made.left_out:
        typer.echo(f"{made.left_out} lines left out: they share no beginning with another, or are no requests.")
