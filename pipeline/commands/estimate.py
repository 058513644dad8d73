"""`--dry-run` of the commands that make a job."""

import json
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from kernels.settings import KernelSettings
    from pipeline.documents import ReadOptions
    from pipeline.questions import Question
    from pipeline.splitting import Splitter


def tell_estimate(
    kernel: "KernelSettings",
    files: list[str],
    asked: "list[Question]",
    reading: "ReadOptions",
    splitter: "Splitter | None",
    *,
    make_tables: bool,
    json_output: bool,
) -> None:
    from pipeline.dry_run import estimate
    from pipeline.screen import counting
    from pipeline.settings import PipelineSettings
    from pipeline.submit import named_sources
    from storage.database import Database
    from storage.settings import StorageSettings

    storage, settings = StorageSettings(), PipelineSettings()
    sources = named_sources(files, settings, storage)
    database = Database(storage)
    if make_tables:
        database.upgrade()
    else:
        database.check_schema()
    with counting(Console(stderr=True), "Reading files", len(sources)) as tick:
        found = estimate(
            database,
            settings=settings,
            kernel=kernel,
            files=sources,
            questions=asked,
            reading=reading,
            splitter=splitter,
            on_read=tick,
        )
    database.close()
    typer.echo(json.dumps(found.record()) if json_output else "\n".join(found.lines()))
