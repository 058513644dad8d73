"""The command line: its commands put together, and every known error as one sentence with its exit code."""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pipeline.commands import advice, insight, installation, jobs, nightly, operations, playbooks, reports, snapshots
from pipeline.commands.batch import import_questions, run_batch
from pipeline.commands.evaluate import evaluate
from pipeline.commands.planning import plan
from pipeline.commands.prefill import prefill
from pipeline.commands.run import run
from pipeline.commands.submit import submit
from pipeline.commands.worker import worker
from pipeline.exits import Exit

if TYPE_CHECKING:
    from pydantic import ValidationError

cli = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def main() -> None:
    """Entry point: turns every known error into one sentence and its exit code."""
    from tomllib import TOMLDecodeError

    from pydantic import ValidationError

    from kernels.errors import KernelError
    from pipeline.errors import LocalServerError, PipelineError
    from storage.errors import (
        ArchiveRefused,
        DocumentUnknown,
        JobMissing,
        KeyTaken,
        QueueFull,
        RetryRefused,
        ScheduleMissing,
        ScheduleTaken,
        SettingsError,
        SnapshotInUse,
        SnapshotMissing,
        StorageError,
    )
    from tasks.errors import TaskError

    asked_wrong = (
        JobMissing,
        KeyTaken,
        RetryRefused,
        ScheduleMissing,
        ScheduleTaken,
        DocumentUnknown,
        SnapshotMissing,
        SnapshotInUse,
        ArchiveRefused,
        SettingsError,
    )
    try:
        cli()
    except QueueFull as exc:
        _leave(Exit.QUEUE_FULL, str(exc))
    except (StorageError, KernelError, TaskError, LocalServerError) as exc:
        _leave(Exit.USAGE if isinstance(exc, asked_wrong) else Exit.UNAVAILABLE, str(exc))
    except PipelineError as exc:
        _leave(Exit.USAGE, str(exc))
    except ValidationError as exc:
        _leave(Exit.USAGE, _settings_sentence(exc))
    except TOMLDecodeError as exc:
        _leave(Exit.USAGE, f"The settings file is not valid TOML: {exc}. Correct it, or set PLATEMAKER_CONFIG.")
    except OSError as exc:
        file = f"{exc.filename}: " if exc.filename else ""
        advice = "Free space there, give this user the right to write, or name another folder."
        _leave(Exit.UNAVAILABLE, f"{file}{exc.strerror or exc}. {advice} What is in the database is kept.")
    except KeyboardInterrupt:
        _leave(Exit.INTERRUPTED, "Stopped.")


def _leave(code: Exit, sentence: str) -> None:
    if logging.getLogger().isEnabledFor(logging.INFO):
        traceback.print_exc()
    Console(stderr=True).print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)


def _settings_sentence(exc: "ValidationError") -> str:
    parts = []
    for error in exc.errors(include_input=False, include_url=False):
        name = f"PLATEMAKER_{str(error['loc'][0]).upper()}: " if error["loc"] else ""
        parts.append(name + error["msg"].removeprefix("Value error, "))
    return f"A setting is wrong. {'; '.join(parts)}."


@cli.callback()
def prepare(
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Log what happens; show the cause of errors.")
    ] = False,
) -> None:
    """Ask many questions of many long documents: each is read once, and every answer comes from its stored KV cache."""
    level = logging.INFO if verbose else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not verbose:
        logging.getLogger("storage.patience").setLevel(logging.WARNING)  # what a person waits for
    file = Path(os.environ.get("PLATEMAKER_CONFIG") or "platemaker.toml")
    if file.is_file():
        from pipeline.settings import check_settings_file

        check_settings_file(file)


cli.command(name="version")(installation.show_version)
for command in (
    run,
    run_batch,
    import_questions,
    submit,
    prefill,
    jobs.status,
    jobs.jobs,
    jobs.watch,
    jobs.answers,
    jobs.cancel,
    jobs.retry,
    reports.report,
    reports.compare,
    insight.stats,
    insight.costs,
    insight.monitor,
    plan,
    advice.advise,
    advice.baseline,
    worker,
    evaluate,
    nightly.beat,
    operations.up,
    operations.down,
    operations.flower,
    operations.exporter,
    installation.doctor,
    snapshots.sweep,
    snapshots.forget,
):
    cli.command()(command)
cli.add_typer(installation.database, name="db")
cli.add_typer(nightly.nightly, name="nightly")
cli.add_typer(playbooks.playbook, name="playbook")
cli.add_typer(snapshots.snapshots, name="snapshots")
