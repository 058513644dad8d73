"""A baseline for a person: a table, bars in the terminal, and how it compares with an earlier one."""

from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.insight.baseline import Baseline
from pipeline.insight.percentiles import spread

BAR = 36


def print_baseline(console: Console, found: Baseline) -> None:
    console.print(
        f"{found.model} on {found.device}, {found.dtype}: {found.document_tokens:,} tokens, {found.questions:,} "
        f"questions, up to {found.output_tokens:,} tokens an answer, {found.runs:,} runs",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("seconds", "", "median", "p95", "least", "most", box=None, pad_edge=False, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    ways = {"one piece": found.one_piece, "split": found.split}
    for quantity in ("prefill", "first token", "total"):
        for at, (name, way) in enumerate(ways.items()):
            each = way.spreads()[quantity]
            numbers = (f"{value:,.3f}" for value in (each.p50, each.p95, each.least, each.most))
            table.add_row("" if at else quantity, name, *numbers)
    console.print(table)
    most = max(way.spreads()["total"].p50 for way in ways.values())
    console.print()
    for name, way in ways.items():
        total = way.spreads()["total"].p50
        bar = "█" * max(1, round(BAR * total / most))
        console.print(f"{name:10} {bar} {total:,.2f} s, {way.memory_mb:,.0f} MB", highlight=False)
    times = "" if found.speed_up is None else f"The split is {found.speed_up:,.1f} times as fast. "
    same = f"{found.equal_answers:,} of {found.questions:,} answers are equal"
    why = "" if found.equal_answers == found.questions or found.dtype == "float32" else f" (as {found.dtype} rounds)"
    console.print(f"\n{times}{same}{why}.", highlight=False)


def print_change(console: Console, found: Baseline, before: dict[str, Any]) -> None:
    """Medians of the total beside those of an earlier record."""
    for name, way in (("one_piece", found.one_piece), ("split", found.split)):
        then, now = spread(before[name]["total_s"]), spread(way.total_s)
        if then and now:
            change = now.p50 / then.p50 - 1
            console.print(f"{name.replace('_', ' ')}: {then.p50:,.2f} s before, {now.p50:,.2f} s now ({change:+.0%})")
