"""`nightly` and `beat`: jobs that are submitted by the clock."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands.opening import kick, opened, traced
from pipeline.commands.options import Json, QuestionOptions, ReadingOptions, SplitLong, TierOption, taking, variables
from pipeline.documents import Split
from pipeline.exits import Exit
from storage.tiers import Tier

if TYPE_CHECKING:
    from datetime import datetime

    from pipeline.nightly.runs import Nightly, Ran
    from storage.schema import ScheduleRow

nightly = typer.Typer(no_args_is_help=True, help="Jobs by the clock: a folder's documents, a file's questions.")

Name = Annotated[str, typer.Argument(help="What the schedule is called.", show_default=False)]


@contextmanager
def _opened_nightly() -> "Iterator[Nightly]":
    from pipeline.nightly.runs import Nightly
    from storage.settings import StorageSettings

    with traced(), opened() as (database, store, settings):
        yield Nightly(database, store, settings, StorageSettings())


@nightly.command()
@taking(QuestionOptions, ReadingOptions)
def add(
    asking: QuestionOptions,
    reading: ReadingOptions,
    *,
    name: Name,
    source: Annotated[
        str, typer.Option("--from", metavar="FOLDER|s3://BUCKET/PREFIX", help="Where the documents lie.")
    ],
    at: Annotated[str, typer.Option(help="When: a cron line, as 0 1 * * *.")],
    zone: Annotated[str, typer.Option("--time-zone", help="Whose clock that is, as Asia/Shanghai.")],
    answer_by: Annotated[
        str | None, typer.Option(metavar="DURATION", help="What is not answered so long after, expires: 6h.")
    ] = None,
    prefill_at: Annotated[
        str | None, typer.Option(metavar="CRON", help="Read new documents then already, before the questions come.")
    ] = None,
    tier: TierOption = Tier.BATCH,
    split: SplitLong = Split.REFUSE,
    json_output: Json = False,
) -> None:
    """Have a job submitted again and again; only new or changed documents and questions are worked on."""
    from kernels.settings import KernelSettings
    from pipeline.nightly.occurrences import next_due, time_zone
    from pipeline.playbooks.library import playbook_path
    from pipeline.times import parse_duration
    from storage.database import utc_now
    from storage.schedules import add_schedule, require_schedule

    if len(asking.questions) != 1 or asking.question:
        raise typer.BadParameter("give one --questions FILE; it is read at each run.")
    asking.load()
    playbook = asking.questions[0]
    now, place = utc_now(), time_zone(zone)
    for line in filter(None, (at, prefill_at)):
        next_due(line, place, now)
    values: dict[str, Any] = {
        "name": name,
        "source": source if source.startswith("s3://") else str(Path(source).absolute()),
        "questions": str(playbook if playbook_path(playbook) != playbook else playbook.absolute()),
        "variables": variables(asking.set),
        "params": asdict(asking.params()),
        "reading": asdict(reading.read_options()),
        "split": split.value,
        "model": KernelSettings().model_name,
        "at": at,
        "prefill_at": prefill_at,
        "time_zone": zone,
        "answer_by_s": None if answer_by is None else parse_duration(answer_by),
        "tier": tier,
    }
    with _opened_nightly() as runs:
        with runs.database.writing() as session:
            add_schedule(session, {"tenant": runs.settings.tenant, **values}, now)
        with runs.database.reading() as session:
            row = require_schedule(session, runs.settings.tenant, name)
    _tell([row], now, json_output=json_output)


@nightly.command(name="list")
def list_them(json_output: Json = False) -> None:
    """List the schedules, with the time of their next run."""
    from storage.database import utc_now
    from storage.schedules import list_schedules

    with _opened_nightly() as runs, runs.database.reading() as session:
        rows = list(list_schedules(session, runs.settings.tenant))
    _tell(rows, utc_now(), json_output=json_output)


@nightly.command(name="run")
def run_now(name: Name, json_output: Json = False) -> None:
    """Submit a schedule's job now, besides its times."""
    from storage.database import utc_now
    from storage.schedules import require_schedule

    with _opened_nightly() as runs:
        with runs.database.reading() as session:
            row = require_schedule(session, runs.settings.tenant, name)
        ran = runs.run_now(row, utc_now())
        kick(runs.database)
    _tell_run(ran, json_output=json_output)
    raise typer.Exit(Exit.OK if ran.job_id else Exit.NOTHING_DONE)


@nightly.command()
def tick(json_output: Json = False) -> None:
    """Submit what is due now, once: for cron, where no worker sees the files."""
    from storage.database import utc_now

    with _opened_nightly() as runs:
        done = runs.tick(utc_now())
        kick(runs.database)
    for ran in done:
        _tell_run(ran, json_output=json_output)


@nightly.command()
def pause(name: Name) -> None:
    """Submit nothing of a schedule until it is resumed."""
    from storage.database import utc_now
    from storage.schedules import pause_schedule

    with _opened_nightly() as runs, runs.database.writing() as session:
        pause_schedule(session, runs.settings.tenant, name, utc_now())
    typer.echo(f"{name} is paused.")


@nightly.command()
def resume(name: Name) -> None:
    """Go on with a paused schedule; what it missed is not made up for."""
    from storage.database import utc_now
    from storage.schedules import resume_schedule

    with _opened_nightly() as runs, runs.database.writing() as session:
        resume_schedule(session, runs.settings.tenant, name, utc_now())
    typer.echo(f"{name} goes on.")


@nightly.command()
def remove(name: Name) -> None:
    """Remove a schedule and its history; its jobs stay."""
    from storage.schedules import remove_schedule

    with _opened_nightly() as runs, runs.database.writing() as session:
        remove_schedule(session, runs.settings.tenant, name)
    typer.echo(f"{name} is removed.")


@nightly.command()
def history(
    name: Name, limit: Annotated[int, typer.Option(min=1, help="How many.")] = 20, json_output: Json = False
) -> None:
    """Show a schedule's newest runs: their jobs, what was new, what was carried over, what went wrong."""
    from pipeline.nightly.runs import Ran
    from storage.schedules import require_schedule, schedule_runs

    with _opened_nightly() as runs, runs.database.reading() as session:
        row = require_schedule(session, runs.settings.tenant, name)
        found = schedule_runs(session, row.schedule_id, limit)
    for each in found:
        ran = Ran(
            name,
            each.occurrence,
            each.kind,
            each.job_id,
            each.documents,
            each.new_items,
            each.carried_items,
            each.expected_finish_at,
            each.warning,
            each.error,
        )
        _tell_run(ran, json_output=json_output)


def beat() -> None:
    """Run schedules when they are due, in a process of its own: where the files lie and no worker does."""
    import threading

    from pipeline.nightly.beat import beat as keep_beating
    from tasks.settings import TaskSettings

    with _opened_nightly() as runs:

        def tell(ran: "Ran") -> None:
            kick(runs.database)
            _tell_run(ran, json_output=False)

        keep_beating(runs, every_s=TaskSettings().upkeep_s, stopped=threading.Event(), on_run=tell)


def _tell(rows: "list[ScheduleRow]", now: "datetime", *, json_output: bool) -> None:
    from pipeline.nightly.occurrences import next_due, time_zone

    for row in rows:
        due = None if row.paused_at else next_due(row.at, time_zone(row.time_zone), now)
        if json_output:
            record = {
                "name": row.name,
                "from": row.source,
                "questions": row.questions,
                "at": row.at,
                "prefill_at": row.prefill_at,
                "time_zone": row.time_zone,
                "answer_by_s": row.answer_by_s,
                "split": row.split,
                "model": row.model,
                "tier": row.tier,
                "paused": row.paused_at is not None,
                "next": due.due_at.isoformat() if due else None,
            }
            typer.echo(json.dumps(record))
        else:
            when = f"next {due.name} ({row.time_zone})" if due else "paused"
            typer.echo(f"{row.name}  {row.at}  {when}  {row.source}")


def _tell_run(ran: "Ran", *, json_output: bool) -> None:
    if json_output:
        finish = ran.expected_finish_at
        typer.echo(json.dumps({**asdict(ran), "expected_finish_at": finish.isoformat() if finish else None}))
        return
    if ran.job_id is None:
        typer.echo(f"{ran.schedule} {ran.occurrence} {ran.kind}: {ran.error or 'being submitted'}")
        return
    expected = f"; done about {ran.expected_finish_at:%Y-%m-%d %H:%M} UTC" if ran.expected_finish_at else ""
    counts = f"{ran.documents:,} documents, {ran.new_items:,} answers to give, {ran.carried_items:,} carried over"
    typer.echo(f"{ran.schedule} {ran.occurrence} {ran.kind}: job {ran.job_id}, {counts}{expected}")
    if ran.warning:
        typer.echo(f"  {ran.warning}")
