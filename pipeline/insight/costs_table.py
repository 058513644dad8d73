"""Costs for a person."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pipeline.insight.costs import Charge
from storage.charge_by import ChargeBy

MOST_LINES = 30


def print_costs(console: Console, by: ChargeBy, lines: Sequence[Charge], total: Charge) -> None:
    table = Table(by.value, box=None, pad_edge=False, header_style="bold")
    for name in ("answers", "tokens in", "cached", "out", "device s", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines[:MOST_LINES]:
        table.add_row(*_cells(line))
    if len(lines) > MOST_LINES:
        table.add_row(f"… {len(lines) - MOST_LINES:,} more, with --csv")
    table.add_section()
    table.add_row(*_cells(total), style="bold")
    console.print(table)
    console.print()
    for text in _comparison(total):
        console.print(text, highlight=False, soft_wrap=True)


def _cells(line: Charge) -> tuple[str, ...]:
    used = line.used
    key = line.key if len(line.key) <= 32 else line.key[:16] + "…"
    counts = (used.answers, used.input_tokens, used.cached_tokens, used.output_tokens)
    return (key, *(f"{count:,}" for count in counts), f"{used.device_s:,.1f}", _money(line.total))


def _comparison(total: Charge) -> list[str]:
    if total.total is None:
        return ["Set PLATEMAKER_PRICE_PER_DEVICE_HOUR (and the prices of the store) to see costs."]
    found = []
    if total.per_1000_tokens is not None:
        found.append(f"A thousand tokens cost {total.per_1000_tokens:,.6f}.")
    if total.reading_every_time is not None and total.device is not None:
        found.append(
            f"Devices cost {total.device:,.4f}; reading every document again for every question, they would have cost "
            f"about {total.reading_every_time:,.4f}{_ratio(total.reading_every_time, total.device)}."
        )
    if total.hosted is not None:
        found.append(
            f"All of this costs {total.total:,.4f}; the hosted prices given would make it {total.hosted:,.4f}"
            f"{_ratio(total.hosted, total.total)}."
        )
    return found


def _ratio(other: float, own: float) -> str:
    return f" ({other / own:,.1f} times as much)" if own > 0 else ""


def _money(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4f}"
