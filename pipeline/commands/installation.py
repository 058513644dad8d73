"""Commands for whoever installs and updates: `doctor`, `db upgrade`, `version`."""

import json
from importlib.metadata import version
from itertools import chain
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.opening import device_settings
from pipeline.commands.options import Json
from pipeline.exits import Exit

database = typer.Typer(no_args_is_help=True, help="The database.")


def show_version() -> None:
    """Print the version."""
    typer.echo(version("platemaker"))


def doctor(
    device: Annotated[
        str | None,
        typer.Option(help="Instead, run every op the engine needs on this device: musa, cuda, cpu, or one card."),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also send a message through every queue and compare the workers.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Check database, store, broker, device and model by really using them."""
    if device is not None:
        from pipeline.device_table import show_device_check

        passed = show_device_check(device, console=Console(), json_output=json_output)
        raise typer.Exit(Exit.OK if passed else Exit.UNAVAILABLE)

    kernel = device_settings()

    from pipeline.doctor import run_checks
    from storage.settings import StorageSettings
    from tasks.settings import TaskSettings

    task = TaskSettings()
    if cluster and task.broker_url is None:
        raise typer.BadParameter("there is no cluster without a broker: set PLATEMAKER_BROKER_URL.")
    checks = run_checks(StorageSettings(), kernel, task)
    if cluster:
        from pipeline.cluster_checks import cluster_checks

        checks = chain(checks, cluster_checks(StorageSettings(), task))
    healthy = True
    console = Console()
    for check in checks:
        healthy &= check.ok
        if json_output:
            typer.echo(json.dumps(vars(check)))
        else:
            mark, style = ("ok  ", "green") if check.ok else ("FAIL", "bold red")
            console.print(f"[{style}]{mark}[/] {check.name:13}", end=" ")
            console.print(f"{check.detail} ({check.seconds:.2f} s)", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(Exit.OK if healthy else Exit.UNAVAILABLE)


@database.command()
def upgrade() -> None:
    """Create the tables, or bring them to this version."""
    from storage.database import Database
    from storage.settings import StorageSettings

    database = Database(StorageSettings())
    database.upgrade()
    database.close()
    typer.echo(f"{database.description}: schema is current")
