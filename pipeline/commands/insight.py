"""`stats`, `costs`, `monitor`: what was done, what it cost, what happens now."""

import csv
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.opening import opened
from pipeline.commands.options import Json
from storage.charge_by import ChargeBy

Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="From then on: 24h ago as 24h, or 2026-12-01T00:00. Default: all.")
]
Tenant = Annotated[str | None, typer.Option(help="Another tenant's, or 'all'. Default: PLATEMAKER_TENANT.")]


def stats(since: Since = None, tenant: Tenant = None, json_output: Json = False) -> None:
    """Prefill time, hit rate, load time, time to first token; tokens saved; cost."""
    from pipeline.insight.costs import Prices
    from pipeline.insight.stats import collect, print_stats
    from pipeline.times import parse_since
    from storage.database import utc_now

    now = utc_now()
    with opened() as (database, _store, settings):
        found = collect(
            database,
            tenant=_tenant(tenant, settings.tenant),
            since=None if since is None else parse_since(since, now),
            now=now,
            prices=Prices.of(settings),
        )
    if json_output:
        typer.echo(json.dumps(found.record()))
    else:
        print_stats(Console(), found)


def costs(
    by: Annotated[ChargeBy, typer.Option(help="Whose costs to tell apart.")] = ChargeBy.JOB,
    job: Annotated[str | None, typer.Option(help="Of this job alone.")] = None,
    since: Since = None,
    tenant: Tenant = None,
    csv_output: Annotated[bool, typer.Option("--csv", help="Print CSV, for a spreadsheet.")] = False,
    hosted_input_price: Annotated[
        float | None, typer.Option(min=0, help="A hosted model's price for a million input tokens, to compare with.")
    ] = None,
    hosted_output_price: Annotated[
        float | None, typer.Option(min=0, help="A hosted model's price for a million output tokens.")
    ] = None,
    json_output: Json = False,
) -> None:
    """What each tenant, job or document used, and what that costs; docs/cost.md has the rules."""
    from pipeline.insight.costs import Prices, charges
    from pipeline.insight.costs_table import print_costs
    from pipeline.times import parse_since
    from storage.charges import usage
    from storage.database import utc_now

    if (hosted_input_price is None) != (hosted_output_price is None):
        raise typer.BadParameter("give both --hosted-input-price and --hosted-output-price.")
    now = utc_now()
    with opened() as (database, _store, settings):
        with database.reading() as session:
            found = usage(
                session,
                by=by,
                tenant=_tenant(tenant, None if by == ChargeBy.TENANT else settings.tenant),
                job_id=job,
                since=None if since is None else parse_since(since, now),
                now=now,
            )
        prices = Prices.of(settings, hosted_input=hosted_input_price, hosted_output=hosted_output_price)
    lines, total = charges(found, prices)
    if json_output:
        typer.echo(json.dumps({"lines": [line.record() for line in lines], "total": total.record()}))
    elif csv_output:
        writer = csv.DictWriter(sys.stdout, list(total.record()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(line.record() for line in (*lines, total))
    else:
        print_costs(Console(), by, lines, total)


def monitor(
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="How often to look.")] = 2.0,
    json_output: Json = False,
) -> None:
    """Show queues, workers, jobs and rates, live, until Ctrl-C."""
    import time

    from pipeline.insight.monitor import look, screen, watch

    with opened() as (database, _store, settings):
        if json_output:
            while True:
                typer.echo(json.dumps(look(database, settings.tenant).record()))
                if once:
                    return
                time.sleep(every)
        console = Console()
        if once:
            console.print(screen(look(database, settings.tenant), console.width, console.height))
        else:
            watch(database, settings.tenant, console, every)


def _tenant(given: str | None, default: str | None) -> str | None:
    return None if given == "all" else given or default
