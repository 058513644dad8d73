"""Looking at jobs and ending them."""

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.commands.opening import kick, opened, traced
from pipeline.commands.options import JobId, Json
from pipeline.exits import exit_code
from storage.tiers import Tier

if TYPE_CHECKING:
    from pipeline.outlook import Outlook
    from storage.progress import JobStatus


class AnswerFormat(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


ByDocument = Annotated[
    bool, typer.Option("--documents", help="Also each document: pages and tokens read, questions done.")
]


def status(job_id: JobId, documents: ByDocument = False, json_output: Json = False) -> None:
    """Say how far a job is, and how long it will take."""
    from pipeline.outlook import document_record, outlook
    from storage.progress import job_status

    with opened() as (database, _store, settings):
        with database.reading() as session:
            found = job_status(session, settings.tenant, job_id)
        ahead = outlook(database, settings.tenant, job_id)
    if json_output:
        record = {**status_record(found), "progress": ahead.record()}
        if documents:
            record["documents"] = [document_record(each) for each in ahead.documents]
        typer.echo(json.dumps(record))
        return
    console = Console()
    console.print(status_line(found), highlight=False)
    console.print(f"  {ahead.sentence}", highlight=False)
    if documents:
        print_documents(console, ahead)


def jobs(limit: Annotated[int, typer.Option(min=1, help="How many.")] = 20, json_output: Json = False) -> None:
    """List the newest jobs."""
    from storage.progress import list_jobs

    with opened() as (database, _store, settings), database.reading() as session:
        found = list_jobs(session, settings.tenant, limit)
    for job in found:
        typer.echo(json.dumps(status_record(job)) if json_output else status_line(job))


def watch(job_id: JobId, documents: ByDocument = False, json_output: Json = False) -> None:
    """Show a job until it is done. With --json, a line whenever something changed, and the summary at the end."""
    if documents and not json_output:
        raise typer.BadParameter("--documents goes with --json; `platemaker status JOB --documents` shows a table.")
    from pipeline.report.rows import report_lines
    from pipeline.report.summary import summarise
    from pipeline.report.table import print_summary
    from pipeline.screen import follow
    from storage.progress import job_status

    console = Console()
    with opened() as (database, store, settings):
        with database.reading() as session:
            job_status(session, settings.tenant, job_id)
        follow(database, settings.tenant, job_id, console=console, json_lines=json_output, by_document=documents)
        summary = summarise(database, settings.tenant, job_id, report_lines(database, store, settings.tenant, job_id))
    if json_output:
        typer.echo(json.dumps(summary.record()))
    else:
        print_summary(console, summary, ())
    raise typer.Exit(exit_code(summary))


def answers(
    job_id: JobId,
    answer_format: Annotated[AnswerFormat, typer.Option("--format", help="How to print them.")] = AnswerFormat.TABLE,
) -> None:
    """Print a job's answers, also while it runs: one row per file and question."""
    from pipeline.report.files import stream_report
    from pipeline.report.formats import Format
    from pipeline.report.rows import report_lines
    from pipeline.report.table import print_table
    from storage.progress import job_status
    from tasks.traces import span

    with traced(), opened() as (database, store, settings):
        if answer_format == AnswerFormat.TABLE:
            with database.reading() as session:
                job_status(session, settings.tenant, job_id)
            with span("report", job_id, format="table") as told:
                lines = list(report_lines(database, store, settings.tenant, job_id))
                print_table(Console(), lines, most_rows=len(lines))
                told.note(rows=len(lines))
        else:
            stream_report(database, store, settings.tenant, job_id, Format(answer_format.value), sys.stdout)


def cancel(job_id: JobId, json_output: Json = False) -> None:
    """End a job. Finished answers are kept; with the workers down it works just as well."""
    from storage.database import utc_now
    from storage.endings import cancel_job
    from storage.progress import job_status

    with opened() as (database, _store, settings):
        with database.writing() as session:
            cancel_job(session, settings.tenant, job_id, utc_now())
        with database.reading() as session:
            found = job_status(session, settings.tenant, job_id)
    typer.echo(json.dumps(status_record(found)) if json_output else status_line(found))


def retry(
    job_id: JobId,
    expired: Annotated[bool, typer.Option("--expired", help="Also what was not answered in time.")] = False,
    answer_by: Annotated[
        str | None, typer.Option(metavar="TIME", help="A new time to answer: a time, or 6h from now. Default: none.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Queue a job's failed items again; answers, snapshots and what is running stay."""
    from pipeline.times import parse_when
    from storage.database import utc_now
    from storage.endings import retry_job
    from storage.progress import job_status

    now = utc_now()
    by = None if answer_by is None else parse_when(answer_by, now)
    with opened() as (database, _store, settings):
        with database.writing() as session:
            retry_job(session, settings.tenant, job_id, expired=expired, answer_by=by, now=now)
        kick(database, first=job_id)
        with database.reading() as session:
            found = job_status(session, settings.tenant, job_id)
    typer.echo(json.dumps(status_record(found)) if json_output else status_line(found))


def print_documents(console: Console, ahead: "Outlook") -> None:
    table = Table("Document", "Pages read", "Tokens read", "Questions", box=box.SIMPLE_HEAD, show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in ahead.documents:
        if each.error:
            table.add_row(Text(each.name), Text(each.error, style="red"), "", "")
            continue
        sections = f" ({len(each.pieces)} sections)" if len(each.pieces) > 1 else ""
        table.add_row(
            Text(each.name + sections),
            f"{each.pages_read:,} of {each.pages:,}",
            f"{each.tokens_read:,} of {each.tokens:,}" if each.tokens else "not begun",
            f"{each.items_done:,} of {each.items:,}",
        )
    console.print(table)


def status_line(job: "JobStatus") -> str:
    if job.finished_at is not None:
        state = "cancelled" if job.cancelled_at else "finished"
    else:
        state = "stopping" if job.cancelled_at else "running" if job.done else "waiting"
    counts = ", ".join(f"{count:,} {name.value}" for name, count in sorted(job.items.items()))
    bad = f"; {job.sources_failed} of {job.sources} files unreadable" if job.sources_failed else ""
    title = f" “{job.title}”" if job.title else ""
    split = f"; {job.split:,} long documents in {job.sections:,} sections" if job.split else ""
    done = f"{job.done:,} of {job.total:,} done ({counts or 'no items'})"
    begins = f", begins {job.not_before:%Y-%m-%d %H:%M} UTC" if job.not_before and not job.finished_at else ""
    ends = f", until {job.answer_by:%Y-%m-%d %H:%M} UTC" if job.answer_by and not job.finished_at else ""
    tier = ", fast" if job.tier == Tier.FAST else ""
    return f"{job.job_id}{title} {state}{tier}{begins}{ends}: {done}{split}{bad}"


def status_record(job: "JobStatus") -> dict[str, object]:
    return {
        "job_id": job.job_id,
        "title": job.title,
        "model": job.model,
        "created_at": job.created_at.isoformat(),
        "finished_at": job.finished_at.isoformat() if job.finished_at else None,
        "cancelled_at": job.cancelled_at.isoformat() if job.cancelled_at else None,
        "not_before": job.not_before.isoformat() if job.not_before else None,
        "answer_by": job.answer_by.isoformat() if job.answer_by else None,
        "tier": job.tier.value,
        "sources": job.sources,
        "sources_failed": job.sources_failed,
        "questions": job.questions,
        "rows": job.rows,
        "split": job.split,
        "sections": job.sections,
        "items": {state.value: count for state, count in job.items.items()},
    }
