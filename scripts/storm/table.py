"""What a person sees of the storms."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from storm.incidents import Incident
from storm.seed import Outcome

HEADINGS = {
    "rows": "rows",
    "lost": "lost",
    "failed": "failed",
    "duplicated": "twice",
    "differing": "differ",
    "half_made": "half-made",
    "leases_left": "leases",
    "multiparts_left": "uploads",
    "bad_ends": "bad ends",
}


def line_of(incident: Incident) -> str:
    """As it is told while the storm goes on."""
    return f"{incident.at_s:6.1f} s  {incident.fault.name:16}  {_recovery(incident):>9}  {incident.detail}"


def fault_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("seed", "fault", "at", "recovered after", "whom", box=None, header_style="dim")
    for outcome in outcomes:
        for each in outcome.incidents:
            table.add_row(str(outcome.seed), each.fault.name, f"{each.at_s:.1f} s", _recovery(each), each.detail)
    return table


def seed_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=None, header_style="dim")
    for heading in ("seed", "faults", *HEADINGS.values(), "worst recovery", "took", "tail"):
        table.add_column(heading, no_wrap=True, justify="right")
    for outcome in outcomes:
        counts = vars(outcome.findings)
        table.add_row(
            str(outcome.seed),
            str(len(outcome.incidents)),
            *(_count(name, counts[name]) for name in HEADINGS),
            f"{outcome.worst_recovery_s:.1f} s",
            f"{outcome.wall_s:.0f} s",
            f"{outcome.tail_s:.0f} s",
            style="" if outcome.all_hold else "red",
        )
    return table


def totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Over all seeds, for a program."""
    counts = {name: sum(vars(outcome.findings)[name] for outcome in outcomes) for name in HEADINGS}
    return {
        "seeds": len(outcomes),
        **counts,
        "unrecovered": sum(outcome.unrecovered for outcome in outcomes),
        "worst_recovery_s": round(max((outcome.worst_recovery_s for outcome in outcomes), default=0.0), 2),
        "faults": sum(len(outcome.incidents) for outcome in outcomes),
        "ended_alone": sum(len(outcome.ended_alone) for outcome in outcomes),
    }


def _recovery(incident: Incident) -> str:
    if not incident.is_settled:
        return "never"
    return "–" if incident.recovered_s is None else f"{incident.recovered_s:.1f} s"


def _count(name: str, count: int) -> str:
    return str(count) if name == "rows" or not count else f"[bold red]{count}[/]"
