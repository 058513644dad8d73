"""A screen to leave open: what waits, who works, how far jobs are, how fast it goes. Everything is from the rows."""

import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.words import duration
from storage.database import Database, utc_now
from storage.overview import Overview, overview
from storage.progress import JobStatus, list_jobs
from storage.pulse import Pulse, pulse
from storage.schema import ItemState
from storage.workers import live_workers

WINDOW = timedelta(minutes=1)
SEEN = timedelta(minutes=2)
MOST_JOBS = 200
WIDE = 110


@dataclass(frozen=True)
class SeenWorker:
    name: str
    pool: str
    seen_s: float
    answers: int


@dataclass(frozen=True)
class View:
    """One look. Rates are of the last minute."""

    at: datetime
    rows: Overview
    pulse: Pulse
    workers: tuple[SeenWorker, ...]
    jobs: tuple[JobStatus, ...]

    @property
    def read_tokens_per_s(self) -> float:
        return self.pulse.read_tokens / WINDOW.total_seconds()

    @property
    def written_tokens_per_s(self) -> float:
        return self.pulse.written_tokens / WINDOW.total_seconds()

    @property
    def hit_rate(self) -> float | None:
        return self.pulse.found_ready / self.pulse.looked_up if self.pulse.looked_up else None

    @property
    def memory_rate(self) -> float | None:
        return self.pulse.memory_loads / self.pulse.loads if self.pulse.loads else None

    def left_s(self, job: JobStatus) -> float | None:
        """How long the job takes if answers go on coming as in the last minute, older jobs first; None: none came."""
        if not self.pulse.answers:
            return None
        before = sum(other.open for other in self.jobs if other.created_at <= job.created_at)
        return before / (self.pulse.answers / WINDOW.total_seconds())

    def record(self) -> dict[str, Any]:
        return {
            "at": self.at.isoformat(),
            "queues": {
                "read": {"items": self.pulse.to_read, "oldest_s": self.rows.oldest_reading_s},
                "answer": {"items": self.pulse.to_answer, "oldest_s": self.rows.oldest_answering_s},
            },
            "running": self.rows.items.get(ItemState.RUNNING, 0),
            "workers": [vars(worker) for worker in self.workers],
            "jobs": [
                {"job_id": job.job_id, "done": job.done, "items": job.total, "left_s": self.left_s(job)}
                for job in self.jobs
            ],
            "hit_rate": self.hit_rate,
            "memory_rate": self.memory_rate,
            "read_tokens_per_s": self.read_tokens_per_s,
            "written_tokens_per_s": self.written_tokens_per_s,
            "answers_per_minute": self.pulse.answers,
        }


def look(database: Database, tenant: str) -> View:
    """Queues, workers and rates are the cluster's; jobs are the tenant's, those that have not ended."""
    now = utc_now()
    with database.reading() as session:
        found = pulse(session, since=now - WINDOW)
        rows = overview(session, now=now, workers_seen_after=now - SEEN)
        alive = live_workers(session, seen_after=now - SEEN)
        jobs = list_jobs(session, tenant, MOST_JOBS, only_open=True)
        workers = [
            SeenWorker(
                row.worker,
                row.pool,
                max(0.0, (now - row.seen_at).total_seconds()),
                found.answers_by_worker.get(row.worker, 0),
            )
            for row in alive
        ]
    known = {worker.name for worker in workers}
    # `platemaker run` answers without being a worker of the cluster.
    workers += [
        SeenWorker(name, "run", 0.0, count) for name, count in found.answers_by_worker.items() if name not in known
    ]
    return View(now, rows, found, tuple(workers), tuple(jobs))


def watch(database: Database, tenant: str, console: Console, every_s: float) -> None:
    """Until Ctrl-C, which ends it without a word."""
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                view = look(database, tenant)
                live.update(screen(view, console.width, console.height), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def screen(view: View, width: int, height: int) -> RenderableType:
    """Fits into so many columns and rows; what has no room is counted."""
    room = max(2, height - 13)
    workers = min(len(view.workers), max(1, room // 3)) if view.workers else 1
    jobs = max(1, room - workers)
    return Group(
        _head(view, width),
        Text(),
        _queues(view),
        Text(),
        _jobs(view, jobs),
        Text(),
        _workers(view, workers),
    )


def _head(view: View, width: int) -> Text:
    hits, memory = ("–" if rate is None else f"{rate:.0%}" for rate in (view.hit_rate, view.memory_rate))
    text = Text("Platemaker", style="bold")
    text.append(f"  {view.at:%H:%M:%S} UTC", style="dim")
    last = f"   in memory {memory}   in the last minute" if width >= WIDE else ""
    text.append(
        f"   read {view.read_tokens_per_s:,.0f} tok/s   written {view.written_tokens_per_s:,.1f} tok/s   "
        f"hits {hits}{last}",
        style="not bold",
    )
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 else "right", no_wrap=True, overflow="ellipsis")
    return table


def _queues(view: View) -> Table:
    table = _table("Questions", "count", "oldest job")
    rows = view.rows
    for name, count, oldest_s in (
        ("wait for their document", view.pulse.to_read, rows.oldest_reading_s),
        ("wait for an answer", view.pulse.to_answer, rows.oldest_answering_s),
    ):
        table.add_row(name, f"{count:,}", duration(oldest_s) if count else "–")
    table.add_row("are being answered", f"{rows.items.get(ItemState.RUNNING, 0):,}", "")
    return table


def _jobs(view: View, most: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("Jobs", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("", ratio=2)
    for name in ("done", "failed", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    if not view.jobs:
        table.add_row(Text("none is open", style="dim"))
    oldest_first = sorted(view.jobs, key=lambda job: job.created_at)
    shown = oldest_first if len(oldest_first) <= most else oldest_first[: max(1, most - 1)]
    for job in shown:
        left_s = view.left_s(job)
        failed = job.items.get(ItemState.FAILED, 0)
        table.add_row(
            f"{job.job_id} {job.title}",
            ProgressBar(total=max(job.total, 1), completed=job.done, complete_style="green", finished_style="green"),
            f"{job.done:,}/{job.total:,}",
            Text(f"{failed:,}", style="red" if failed else "dim"),
            "–" if left_s is None else duration(left_s),
        )
    if len(shown) < len(oldest_first):
        table.add_row(Text(f"… {len(oldest_first) - len(shown):,} more", style="dim"))
    return table


def _workers(view: View, most: int) -> Table:
    table = _table("Workers", "pool", "answers/min", "seen")
    if not view.workers:
        table.add_row(Text("none was seen in the last two minutes", style="yellow"))
    shown = view.workers if len(view.workers) <= most else view.workers[: max(1, most - 1)]
    for worker in shown:
        quiet = worker.seen_s > 30
        table.add_row(
            worker.name,
            worker.pool,
            f"{worker.answers:,}",
            Text(f"{duration(worker.seen_s)} ago", style="yellow" if quiet else "dim"),
        )
    if len(shown) < len(view.workers):
        table.add_row(Text(f"… {len(view.workers) - len(shown):,} more", style="dim"))
    return table
