"""Commands for whoever runs the cluster: `up`, `down`, `flower`, `exporter`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.options import Json

STOP_S = 90.0
EXPORTER_PORT = 9464


def up(
    prefill: Annotated[int, typer.Option(min=0, help="Workers that read documents.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Workers that answer questions.")] = 1,
    postgres: Annotated[bool, typer.Option("--postgres", help="PostgreSQL instead of SQLite.")] = False,
    flower: Annotated[bool, typer.Option(help="Flower, to watch tasks in a browser.")] = True,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Print the settings of what is running, for eval in another terminal.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Start the whole stack on this machine and watch over it, until Ctrl-C or `platemaker down`."""
    from pipeline.stack.record import Record

    folder = _folder()
    if print_env:
        typer.echo(Record(folder).read_settings(), nl=False)
        return

    from pipeline.stack.screen import json_lines, live_screen
    from pipeline.stack.up import StackSize, run_stack

    console = Console(stderr=json_output)
    run_stack(
        folder,
        StackSize(prefill=prefill, decode=decode, postgres=postgres, flower=flower),
        on_step=lambda text: console.print(text, style="dim", highlight=False, soft_wrap=True),
        showing=json_lines if json_output else lambda stack: live_screen(console, stack),
    )
    console.print("Everything has ended. The data is kept; `platemaker up` goes on with it.", style="dim")


def down() -> None:
    """Stop what `platemaker up` started, also where it was killed."""
    from pipeline.stack.record import Record

    count = Record(_folder()).take_down(STOP_S)
    typer.echo(f"Stopped {count} processes; the data is kept.")


def flower() -> None:
    """Start Flower, the web page that shows workers and tasks, with a password."""
    from pipeline.flower import serve_flower
    from pipeline.settings import PipelineSettings
    from tasks.settings import TaskSettings

    task = TaskSettings()
    if task.broker_url is None:
        raise typer.BadParameter("Flower watches a broker: set PLATEMAKER_BROKER_URL.")
    serve_flower(task, PipelineSettings(), Console())


def exporter() -> None:
    """Serve Prometheus what the rows and the queues say: items, oldest wait, snapshots, workers."""
    from storage.database import Database
    from storage.settings import StorageSettings
    from tasks.app import configure
    from tasks.health import HttpServer
    from tasks.row_metrics import row_registry
    from tasks.settings import TaskSettings

    task = TaskSettings()
    if task.broker_url is None:
        raise typer.BadParameter("the exporter asks a broker: set PLATEMAKER_BROKER_URL.")
    database = Database(StorageSettings().model_copy(update={"patience_s": 0.0}))
    database.check_schema()
    registry = row_registry(database, configure(task), lease_s=task.lease_s, breaker_rule=task.breaker_rule)
    server = HttpServer(task.metrics_address, task.metrics_port or EXPORTER_PORT, registry)
    typer.echo(f"Metrics of the cluster are at {server.url}/metrics")
    server.serve_forever()


def _folder() -> Path:
    from storage.settings import StorageSettings

    return StorageSettings().data_dir / "up"
