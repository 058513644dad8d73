"""`evaluate`: how well a model does, in numbers."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.opening import device_settings
from pipeline.commands.options import Json, SplitLong
from pipeline.documents import Split


def evaluate(
    file: Annotated[Path, typer.Argument(help="Contracts with gold answers, as ContractNLI's files.")],
    *,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many documents.")] = None,
    questions: Annotated[
        Path, typer.Option(help="Playbook that asks yes or no under the ids of the file's statements.")
    ] = Path("nda"),
    model: Annotated[str | None, typer.Option(help="Model folder, .gguf file or hub id.")] = None,
    split: SplitLong = Split.REFUSE,
    json_output: Json = False,
) -> None:
    """Measure a model on contracts with gold answers: right answers, and quotes that show them."""
    from pipeline.nli_file import read_gold
    from pipeline.questions import load_questions

    documents, asked, kernel = read_gold(file, limit), load_questions([questions], []), device_settings(model)

    from kernels.params import GenerationParams
    from pipeline.evaluate import evaluate as measure  # only now: what is wrong so far is told before torch is loaded
    from pipeline.settings import PipelineSettings
    from storage.settings import StorageSettings
    from tasks.settings import TaskSettings

    console = Console(stderr=json_output)
    measured = measure(
        documents,
        storage=StorageSettings(),
        kernel=kernel,
        task=TaskSettings().model_copy(update={"broker_url": None}),
        settings=PipelineSettings(),
        questions=asked,
        options=GenerationParams(quote=True),
        split=split,
        console=console,
    )
    if json_output:
        typer.echo(json.dumps(measured))
        return
    for name, value in measured.items():
        shown = f"{value:.1%}" if isinstance(value, float) else json.dumps(value)
        console.print(f"{name.replace('_', ' '):34} {shown}", highlight=False, markup=False)
