"""Reports of jobs, and what changed between two."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.opening import opened, traced
from pipeline.commands.options import JobId, Json
from pipeline.exits import Exit
from pipeline.report.formats import Format

Out = Annotated[
    list[Path],
    typer.Option("-o", "--out", help="File: .xlsx, .html, .csv, .jsonl or .md; - for the screen. Repeatable."),
]


def report(
    job_id: JobId,
    out: Out,
    report_format: Annotated[
        Format | None, typer.Option("--format", help="The format, where the file's ending does not say.")
    ] = None,
    bom: Annotated[
        bool, typer.Option("--bom/--no-bom", help="Begin CSV with a byte order mark, for spreadsheet programs.")
    ] = True,
    json_output: Json = False,
) -> None:
    """Write a job's answers to files, also while it runs: every row in is a row out."""
    from pipeline.report.files import stream_report, write_reports
    from pipeline.report.table import print_summary

    to_screen = Path("-") in out
    if to_screen and (len(out) > 1 or report_format in (None, Format.XLSX)):
        raise typer.BadParameter("-o - stands alone and needs --format html, csv, jsonl or md.")
    if report_format and len(out) > 1:
        raise typer.BadParameter("--format goes with one file; for several, their endings say it.")
    formats = [report_format] if report_format else None
    with traced(), opened() as (database, store, settings):
        if to_screen:
            assert report_format is not None
            stream_report(database, store, settings.tenant, job_id, report_format, sys.stdout)
            return
        summary = write_reports(database, store, settings.tenant, job_id, out, formats=formats, bom=bom)
    if json_output:
        typer.echo(json.dumps({**summary.record(), "files": [str(path) for path in out]}))
    else:
        print_summary(Console(), summary, tuple(out))


def compare(
    before: Annotated[str, typer.Argument(help="The earlier job.", show_default=False)],
    after: Annotated[str, typer.Argument(help="The later job.", show_default=False)],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File: .xlsx, .csv or .jsonl.")] = None,
    same: Annotated[bool, typer.Option("--same", help="Also list what is the same.")] = False,
    most_rows: Annotated[int, typer.Option("--rows", min=1, help="Most rows on the screen.")] = 100,
    json_output: Json = False,
) -> None:
    """Say what changed between two jobs: documents, questions and answers."""
    from pipeline.report.compare import Comparison, Kind
    from pipeline.report.compare_files import print_comparison, write_comparison

    with opened() as (database, store, settings):
        comparison = Comparison(database, store, settings.tenant, before, after)
        if out is not None:
            write_comparison(comparison, out, same=same)
            if json_output:
                typer.echo(json.dumps(comparison.record()))
            else:
                counts = ", ".join(f"{comparison.counts[kind]:,} {kind.value}" for kind in Kind)
                typer.echo(f"{out}: {counts}")
        elif json_output:
            for change in comparison.changes():
                if same or change.kind != Kind.SAME:
                    typer.echo(json.dumps(change.record()))
            typer.echo(json.dumps(comparison.record()))
        else:
            print_comparison(Console(), comparison, same=same, most_rows=most_rows)
    raise typer.Exit(Exit.OK)
