"""What a person sees while a job runs: reading, storing, answering, from the rows."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeline.outlook import Outlook, document_record, outlook
from pipeline.words import duration
from storage.database import Database
from storage.progress import JobStatus, job_progress, job_status
from storage.progress import Progress as JobProgress

POLL_S = 0.2
OUTLOOK_S = 2.0  # between two counts of what costs more to count


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
    by_document: bool = False,
    check: Callable[[], None] = lambda: None,
) -> JobStatus:
    """Shows the job until it has finished; returns how it ended. Only reads.

    `json_lines` prints a line for programs whenever something changed, with `by_document` one for each document that
    did, too. `check` is called at every look, and ends the showing by raising.
    """
    with _bars(console, hidden=json_lines) as progress:
        screen = _Screen(console, progress)
        lines = _Lines(job_id, by_document=by_document)
        ahead, looked_at = outlook(database, tenant, job_id), time.monotonic()
        while True:
            with database.reading() as session:
                now = job_progress(session, tenant, job_id)
            is_over = now.items_done == now.items
            if is_over or time.monotonic() - looked_at >= OUTLOOK_S:
                ahead, looked_at = outlook(database, tenant, job_id), time.monotonic()
            if json_lines:
                lines.print(now, ahead)
            else:
                screen.show(now, ahead)
            if is_over:
                with database.reading() as session:
                    status = job_status(session, tenant, job_id)
                if status.finished_at is not None:
                    return status
            check()
            time.sleep(POLL_S)


class _Lines:
    """JSON lines on standard output: of the job and of each document, when they changed."""

    def __init__(self, job_id: str, *, by_document: bool) -> None:
        self._job_id, self._by_document = job_id, by_document
        self._last: dict[int, dict[str, Any]] = {}

    def print(self, now: JobProgress, ahead: Outlook) -> None:
        if self._by_document:
            for document in ahead.documents:
                self._print(document.position, document_record(document))
        # What is counted at every look goes before what is counted now and then.
        self._print(-1, {**ahead.record(), **asdict(now)})

    def _print(self, key: int, record: dict[str, Any]) -> None:
        if self._last.get(key) != record:
            self._last[key] = record
            print(json.dumps({"job_id": self._job_id, **record}), flush=True)  # noqa: T201 # for programs


class _Screen:
    """Bars on a terminal; off one, a line when a stage begins and for each tenth of the answers."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._reading = progress.add_task("Reading and storing", total=None, visible=False)
        self._answering = progress.add_task("Answering", total=None, start=False)
        self._last: JobProgress | None = None

    def show(self, now: JobProgress, ahead: Outlook) -> None:
        progress = self._progress
        pages = f", {ahead.pages_read:,} of {ahead.pages:,} pages" if ahead.pages else ""
        text = f"Reading and storing ({now.documents_read:,} of {now.documents:,} documents{pages})"
        if now.reading_tokens:
            read, total = now.reading_done, now.reading_tokens
            progress.update(self._reading, description=text, total=total, completed=read, visible=True)
        else:
            progress.update(self._reading, description=text, visible=False)
        if now.items_done or not now.reading_tokens:
            progress.start_task(self._answering)
        left = f", about {duration(ahead.seconds_left)} left" if ahead.seconds_left else ""
        progress.update(self._answering, description=f"Answering{left}", total=now.items, completed=now.items_done)
        if now != self._last and not self._console.is_terminal:
            self._tell(now, left)
        self._last = now

    def _tell(self, now: JobProgress, left: str) -> None:
        last, tell = self._last, self._console.print
        if now.reading_tokens and not (last and last.reading_tokens):
            tell(f"Reading {now.reading_tokens:,} tokens{left}", highlight=False)
        if last and now.found > last.found:
            tell(f"Found {now.found} snapshot(s) ready", highlight=False)
        tenth = max(1, now.items // 10)
        if now.items_done // tenth > (last.items_done // tenth if last else 0):
            tell(
                f"Answered {now.items_done} of {now.items}{left if now.items_done < now.items else ''}", highlight=False
            )


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
