"""`--dry-run` of the commands that make a job."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from kernels.settings import KernelSettings
    from pipeline.questions import Question


def tell_estimate(
    kernel: "KernelSettings", files: list[Path], asked: "list[Question]", *, make_tables: bool, json_output: bool
) -> None:
    from pipeline.dry_run import estimate
    from pipeline.screen import counting
    from pipeline.settings import PipelineSettings
    from storage.database import Database
    from storage.settings import StorageSettings

    database = Database(StorageSettings())
    if make_tables:
        database.upgrade()
    else:
        database.check_schema()
    settings = PipelineSettings()
    with counting(Console(stderr=True), "Reading files", len(files)) as tick:
        found = estimate(database, settings=settings, kernel=kernel, files=files, questions=asked, on_read=tick)
    database.close()
    typer.echo(json.dumps(found.record()) if json_output else "\n".join(found.lines()))
