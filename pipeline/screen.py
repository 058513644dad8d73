"""What a person sees while a job runs: reading, storing, answering, from the rows."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from storage.database import Database
from storage.progress import JobStatus, job_progress, job_status
from storage.progress import Progress as JobProgress

POLL_S = 0.2


@contextmanager
def stage(console: Console, text: str) -> Iterator[None]:
    """A spinner with one line of text; off a terminal, the line alone."""
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text, highlight=False)
        yield


@contextmanager
def counting(console: Console, text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` steps; the block calls what it is given with the index of each finished step."""
    with _bars(console) as progress:
        task = progress.add_task(text, total=total)
        yield lambda index: progress.update(task, completed=index + 1)


def follow(
    database: Database,
    tenant: str,
    job_id: str,
    *,
    console: Console,
    json_lines: bool = False,
    check: Callable[[], None] = lambda: None,
) -> JobStatus:
    """Shows the job until it has finished; returns how it ended. Only reads.

    `check` is called at every look, and ends the showing by raising.
    """
    with _bars(console, hidden=json_lines) as progress:
        reading = progress.add_task("Reading and storing", total=None, visible=False)
        answering = progress.add_task("Answering", total=None, start=False)
        last: JobProgress | None = None
        while True:
            with database.reading() as session:
                now = job_progress(session, tenant, job_id)
            if now != last:
                _show(progress, reading, answering, now)
                if json_lines:
                    print(json.dumps({"job_id": job_id, **asdict(now)}), flush=True)  # noqa: T201 # for programs
                elif not console.is_terminal:
                    _tell(console, last, now)
                last = now
            if now.items_done == now.items:
                with database.reading() as session:
                    status = job_status(session, tenant, job_id)
                if status.finished_at is not None:
                    return status
            check()
            time.sleep(POLL_S)


def _show(progress: Progress, reading: TaskID, answering: TaskID, now: JobProgress) -> None:
    text = f"Reading and storing ({now.documents_read} of {now.documents} documents)"
    if now.reading_tokens:
        progress.update(reading, description=text, total=now.reading_tokens, completed=now.reading_done, visible=True)
    else:
        progress.update(reading, description=text, visible=False)
    if now.items_done or not now.reading_tokens:
        progress.start_task(answering)
    progress.update(answering, total=now.items, completed=now.items_done)


def _tell(console: Console, last: JobProgress | None, now: JobProgress) -> None:
    """Off a terminal: a line when a stage begins, and for each tenth of the answers."""
    if now.reading_tokens and not (last and last.reading_tokens):
        console.print(f"Reading {now.reading_tokens:,} tokens", highlight=False)
    if last and now.found > last.found:
        console.print(f"Found {now.found} snapshot(s) ready", highlight=False)
    tenth = max(1, now.items // 10)
    if now.items_done // tenth > (last.items_done // tenth if last else 0):
        console.print(f"Answered {now.items_done} of {now.items}", highlight=False)


def _bars(console: Console, *, hidden: bool = False) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=hidden or not console.is_terminal,
    )
