"""What a person sees of the running stack, and what a program reads of it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import typer
from pydantic import SecretStr
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipeline.stack.member import Member, State
from pipeline.stack.up import Stack
from storage.database import Database, utc_now
from storage.errors import StorageError
from storage.overview import Overview, overview
from storage.settings import StorageSettings
from tasks.app import configure
from tasks.errors import BrokerUnavailable
from tasks.queue_depth import queue_depths
from tasks.registry import alive_since
from tasks.settings import TaskSettings

ASK_S = 2.0
MARGIN = 3  # for the ^C that the terminal shows: on a full line it would begin another
STYLES = {
    State.STARTING: "yellow",
    State.READY: "green",
    State.CRASHED: "bold red",
    State.STOPPING: "yellow",
    State.STOPPED: "dim",
}


@dataclass
class Load:
    """How much there is to do, asked of broker and rows now and then."""

    database: Database
    task: TaskSettings
    depths: dict[str, int] = field(default_factory=dict)
    rows: Overview | None = None
    _asked_at: float = 0.0

    @classmethod
    def of(cls, stack: Stack) -> "Load":
        url = SecretStr(stack.settings["PLATEMAKER_DATABASE_URL"])
        broker = SecretStr(stack.settings["PLATEMAKER_BROKER_URL"])
        storage = StorageSettings().model_copy(update={"database_url": url, "patience_s": 0.0})
        return cls(Database(storage), TaskSettings().model_copy(update={"broker_url": broker}))

    def ask(self) -> None:
        if time.monotonic() - self._asked_at < ASK_S:
            return
        try:
            with self.database.reading() as session:
                now = utc_now()
                self.rows = overview(session, now=now, workers_seen_after=alive_since(now, self.task.lease_s))
        except StorageError:
            self.rows = None
        try:
            self.depths = queue_depths(configure(self.task))
        except BrokerUnavailable:
            self.depths = {}
        self._asked_at = time.monotonic()


@contextmanager
def live_screen(console: Console, stack: Stack) -> Iterator[Callable[[], None]]:
    """A table that is drawn anew at every look; off a terminal, a line for each change."""
    load = Load.of(stack)
    try:
        if not console.is_terminal:
            yield _Lines(console, stack)
            return
        with Live(console=console, auto_refresh=False) as live:

            def show() -> None:
                load.ask()
                live.update(draw(stack, load, width=console.width - MARGIN), refresh=True)

            show()
            yield show
    finally:
        load.database.close()


@contextmanager
def json_lines(stack: Stack) -> Iterator[Callable[[], None]]:
    """One line for each change of a member, and one when all are ready."""
    told: dict[str, tuple[State, int]] = {}
    was_ready = False

    def show() -> None:
        nonlocal was_ready
        for member in stack.members:
            if told.get(member.name) != (member.state, member.restarts):
                told[member.name] = (member.state, member.restarts)
                typer.echo(json.dumps(record_of(member)))
        if not was_ready and all(member.state == State.READY for member in stack.members):
            was_ready = True
            typer.echo(json.dumps({"event": "ready", "settings": str(stack.folder / "settings.env")}))

    show()
    yield show


def record_of(member: Member) -> dict[str, Any]:
    return {
        "event": "state",
        "name": member.name,
        "state": member.state.value,
        "pid": member.pid,
        "address": member.address,
        "log": str(member.server.log),
        "restarts": member.restarts,
        "exit_code": member.exit_code,
    }


class _Lines:
    def __init__(self, console: Console, stack: Stack) -> None:
        self._console = console
        self._stack = stack
        self._told: dict[str, tuple[State, int]] = {}
        self._was_ready = False
        self()

    def __call__(self) -> None:
        for member in self._stack.members:
            if self._told.get(member.name) != (member.state, member.restarts):
                self._told[member.name] = (member.state, member.restarts)
                pid = f" (process {member.pid})" if member.pid else ""
                line = f"{member.name} {_state_text(member)}{pid} {member.address} {member.server.log}"
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        if not self._was_ready and all(member.state == State.READY for member in self._stack.members):
            self._was_ready = True
            self._console.print(
                'Everything is ready. In another terminal: eval "$(platemaker up --print-env)". '
                "`platemaker down` stops it.",
                highlight=False,
                soft_wrap=True,
            )


def draw(stack: Stack, load: Load, *, width: int) -> Panel:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("what", "state", "where", "process", "up for", "restarts", "log"):
        at_right = title in ("process", "restarts", "up for")
        least = None if title in ("where", "log") else len("starting") if title == "state" else 7
        table.add_column(title, no_wrap=True, justify="right" if at_right else "left", min_width=least)
    for member in stack.members:
        running = member.state in (State.STARTING, State.READY)
        table.add_row(
            Text(member.name, style="bold"),
            Text(_state_text(member), style=STYLES[member.state]),
            member.address.removeprefix("http://"),
            str(member.pid or ""),
            _clock(time.monotonic() - member.launched_at) if running else "",
            Text(str(member.restarts or ""), style="red"),
            Text(str(member.server.log.relative_to(stack.folder)), style="dim"),
        )
    parts: list[Any] = [table]
    for member in stack.members:
        if member.state == State.CRASHED:
            parts.append(Text(f"{member.name}: {member.last_line()}", style="red", overflow="ellipsis", no_wrap=True))
    parts += [Text(), _load_line(load), Text(), _help(stack)]
    title = f"[bold]Platemaker[/] up for {_clock(time.monotonic() - stack.began)}"
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim", padding=(1, 2), width=width)


def _load_line(load: Load) -> Text:
    line = Text()
    if load.depths:
        depths = "   ".join(f"{queue} {depth:,}" for queue, depth in load.depths.items())
        line.append("Queues    ", style="dim").append(f"{depths}\n")
    else:
        line.append("Queues    ", style="dim").append("the broker does not answer\n", style="red")
    line.append("Questions ", style="dim")
    if load.rows is None:
        return line.append("the database does not answer", style="red")
    items = load.rows.items
    oldest_s = max(load.rows.oldest_reading_s, load.rows.oldest_answering_s)
    waiting = f"{items['queued']:,} waiting" + (f" (oldest {_clock(oldest_s)})" if items["queued"] else "")
    ended = {name: count for name, count in items.items() if name not in ("queued", "running") and count}
    rest = "".join(f"   {count:,} {name}" for name, count in ended.items())
    return line.append(f"{waiting}   {items['running']:,} running{rest}")


def _help(stack: Stack) -> Text:
    text = Text(style="dim")
    flower = next((member for member in stack.programs if member.name == "flower"), None)
    if flower is not None:
        text.append("Flower    ").append(f"{flower.address}  user platemaker, password: ", style="none")
        text.append("in the file flower-password\n", style="none")
    text.append("Folder    ").append(f"{stack.folder}\n", style="none")
    text.append("Use it    ").append('eval "$(platemaker up --print-env)"', style="bold not dim")
    text.append("  in another terminal; then platemaker submit …\n")
    text.append("Stop      ").append("Ctrl-C", style="bold not dim").append(" here, or ")
    return text.append("platemaker down", style="bold not dim").append(" there; data stays")


def _state_text(member: Member) -> str:
    if member.state != State.CRASHED:
        return member.state.value
    code = member.exit_code or 0
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    return f"{how}, again in {member.waits_s:.0f} s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
