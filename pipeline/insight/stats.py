"""The four numbers that tell where the trouble is, and what sharing saved."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.insight.costs import Charge, Prices, charges
from pipeline.insight.percentiles import Spread, spread
from storage.charge_by import ChargeBy
from storage.charges import usage
from storage.database import Database
from storage.measures import Measures, OfWay, measures
from storage.pulse import IN_MEMORY
from storage.ways import Way

WAY_NAMES = {Way.SPLIT: "split", Way.ONE_PIECE: "in one piece", Way.FALLBACK: "fallback"}


@dataclass(frozen=True)
class Stats:
    """`hit_rate`: of the documents that jobs asked for, how many had a ready snapshot. `tokens_saved`: what answers
    stood on beyond what was computed for them."""

    found: Measures
    charge: Charge

    @property
    def hit_rate(self) -> float | None:
        return self.found.found_ready / self.found.looked_up if self.found.looked_up else None

    @property
    def memory_rate(self) -> float | None:
        """Of the times that a snapshot was answered from, how often the worker had it in memory."""
        loads = self.found.loads
        return loads.get(IN_MEMORY, 0) / sum(loads.values()) if loads else None

    @property
    def tokens_saved(self) -> int:
        return max(0, self.found.cached_tokens - self.found.computed_tokens)

    @property
    def spreads(self) -> dict[str, Spread | None]:
        found = self.found
        return {
            "prefill_s": spread(found.prefill_s),
            "load_s": spread(found.load_s),
            "first_token_s": spread(found.first_token_s),
        }

    @property
    def ways_gone(self) -> dict[Way, OfWay]:
        """Those that brought any answer."""
        return {way: of for way, of in self.found.ways.items() if of.answers}

    def record(self) -> dict[str, Any]:
        found = self.found
        return {
            **{name: None if each is None else asdict(each) for name, each in self.spreads.items()},
            "hit_rate": self.hit_rate,
            "looked_up": found.looked_up,
            "found_ready": found.found_ready,
            "memory_rate": self.memory_rate,
            "snapshots_from": found.loads,
            "tokens_computed": found.computed_tokens,
            "tokens_saved": self.tokens_saved,
            "output_tokens": found.output_tokens,
            "answers": {
                **{way.value: of.answers for way, of in found.ways.items()},
                "carried_over": found.carried_answers,
            },
            "ways": {way.value: _way_record(of) for way, of in found.ways.items()},
            "cost": self.charge.record(),
        }


def collect(database: Database, *, tenant: str | None, since: datetime | None, now: datetime, prices: Prices) -> Stats:
    with database.reading() as session:
        found = measures(session, tenant=tenant, since=since)
        used = usage(session, by=ChargeBy.TENANT, tenant=tenant, since=since, now=now)
    return Stats(found, charges(used, prices)[1])


def print_stats(console: Console, stats: Stats) -> None:
    found = stats.found
    table = Table("", "count", "median", "p95", box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    names = {
        "prefill_s": "Prefill of a document",
        "load_s": "Load of a snapshot by decode",
        "first_token_s": "First token, once decode has begun",
    }
    for key, each in stats.spreads.items():
        cells = ("0", "–", "–") if each is None else (f"{each.count:,}", _seconds(each.p50), _seconds(each.p95))
        table.add_row(names[key], *cells)
    console.print(table)
    if stats.ways_gone:
        console.print()
        console.print(_ways_table(stats))
    hits = "–" if stats.hit_rate is None else f"{stats.hit_rate:.0%}"
    lines = [
        ("Hit rate", f"{hits}: {found.found_ready:,} of {found.looked_up:,} documents had a snapshot ready"),
        ("Loads", _loads(stats)),
        (
            "Tokens",
            f"{found.computed_tokens:,} computed, {stats.tokens_saved:,} saved, {found.output_tokens:,} written",
        ),
        ("Answers", _shares(found)),
        ("Devices", f"{stats.charge.used.device_s:,.1f} s"),
    ]
    if stats.charge.total is not None:
        lines.append(("Cost", f"{stats.charge.total:,.4f}"))
    console.print()
    for name, text in lines:
        console.print(f"{name:10}{text}", highlight=False, soft_wrap=True)


def _loads(stats: Stats) -> str:
    rate = "–" if stats.memory_rate is None else f"{stats.memory_rate:.0%}"
    memory, copies, store = (stats.found.loads.get(source, 0) for source in (IN_MEMORY, "copies", "store"))
    return f"{rate} in memory: {memory:,} snapshots there, {copies:,} from local copies, {store:,} from the store"


def _way_record(of: OfWay) -> dict[str, Any]:
    spreads = {"first_token_s": spread(of.first_token_s), "total_s": spread(of.total_s)}
    return {
        "answers": of.answers,
        "why": {why.value: count for why, count in of.whys.items()},
        **{name: None if each is None else asdict(each) for name, each in spreads.items()},
    }


def _ways_table(stats: Stats) -> Table:
    """A line for each way that brought answers: how long they took and why they came that way."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("way", "answers", "first token", "p95", "all of it", "p95"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    table.add_column("why")
    for way, of in stats.ways_gone.items():
        first, total = spread(of.first_token_s), spread(of.total_s)
        cells = [_seconds(value) for each in (first, total) if each is not None for value in (each.p50, each.p95)]
        whys = ", ".join(f"{why.value} {count:,}" for why, count in sorted(of.whys.items(), key=lambda one: -one[1]))
        table.add_row(WAY_NAMES[way], f"{of.answers:,}", *cells, whys)
    return table


def _shares(found: Measures) -> str:
    parts = [f"{of.answers:,} {WAY_NAMES[way]}" for way, of in found.ways.items()]
    answers = found.carried_answers + sum(of.answers for of in found.ways.values())
    return f"{answers:,}: {', '.join(parts)}, {found.carried_answers:,} taken over from earlier jobs"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value:,.3f} s"
