"""Starts the stack, watches over it, and stops it in the right order: programs first, servers last."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from pipeline.errors import ProgramRefused
from pipeline.exits import Exit
from pipeline.local_servers import LocalServer, Postgres, SeaweedFS, Valkey
from pipeline.local_servers.process import HOST, can_bind
from pipeline.stack.deaths import tell_death
from pipeline.stack.member import Member, State
from pipeline.stack.program import Program
from pipeline.stack.record import Record, RunningProcess
from pipeline.stack.settings import BUCKET, kept_secret, stack_settings
from storage.database import Database
from storage.settings import StorageSettings

LOOK_S = 0.5
FLOWER_PORT = 5555
OWN_FAULT = (Exit.USAGE, Exit.UNAVAILABLE)  # it says what is wrong, and will not mend by itself


@dataclass(frozen=True)
class StackSize:
    prefill: int
    decode: int
    postgres: bool
    flower: bool


@dataclass
class Stack:
    """The members in the order in which they are started."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    servers: list[Member] = field(default_factory=list)
    programs: list[Member] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def members(self) -> list[Member]:
        return [*self.servers, *self.programs]

    def processes(self) -> list[RunningProcess]:
        pids = [(member.name, member.pid) for member in self.members]
        return [found for name, pid in pids if pid and (found := RunningProcess.of(name, pid))]


def run_stack(
    folder: Path,
    size: StackSize,
    *,
    on_step: Callable[[str], None],
    showing: Callable[[Stack], contextlib.AbstractContextManager[Callable[[], None]]],
) -> None:
    """Returns when it was asked to stop (Ctrl-C or SIGTERM) and everything has ended.

    `on_step` is told what is being done; `showing` wraps the time in between, and what it gives is called now and then.

    Raises:
        AlreadyUp: one is running in this folder.
        LocalServerError: a server or a program does not start.
    """
    record = Record(folder)
    stack = Stack(folder)
    with record.held(), _told_to_stop() as told:
        left = record.end_leftovers()
        if left is not None:
            on_step(f"The last `platemaker up` was killed; of its processes {left} still ran and were ended now")
        try:
            with ExitStack() as servers:
                _start_servers(stack, size, record, servers, on_step)
                _launch_programs(stack, size)
                try:
                    with showing(stack) as show, closing(_database(stack)) as database:
                        _watch(stack, record, told, show, database)
                finally:
                    on_step("Stopping workers: each ends the answer it is at. Ctrl-C again: at once")
                    _stop_programs(stack)
        finally:
            record.clear()


def _start_servers(
    stack: Stack, size: StackSize, record: Record, stopping: ExitStack, on_step: Callable[[str], None]
) -> None:
    folder = stack.folder
    broker = Valkey(folder / "valkey", kept_secret(folder / "valkey-password"))
    store = SeaweedFS(folder / "seaweedfs", BUCKET)
    database = Postgres(folder / "postgres") if size.postgres else None
    wanted: list[tuple[LocalServer, str]] = [(broker, f"{HOST}:{broker.port}"), (store, store.endpoint_url)]
    if database is not None:
        wanted.append((database, f"{HOST}:{database.port}"))
    for server, address in wanted:
        on_step(f"Starting {server.name}")
        server.dies_with_us = True
        server.start()
        stopping.callback(server.stop)
        member = Member(server, address)
        member.started()
        stack.servers.append(member)
        record.write(_everything(stack))
    auth = f"platemaker:{kept_secret(folder / 'flower-password')}"
    workers = max(1, size.prefill + size.decode)
    stack.settings = stack_settings(folder, broker, store, database, flower_auth=auth, workers=workers)
    on_step("Preparing the tables")
    _prepare_tables(stack)
    record.write_settings(stack.settings)


def _prepare_tables(stack: Stack) -> None:
    with closing(_database(stack)) as database:
        database.upgrade()


def _database(stack: Stack) -> Database:
    """That waits for nothing: the screen goes on, and what it was for is done without it too."""
    settings = {"database_url": stack.settings["PLATEMAKER_DATABASE_URL"], "patience_s": 0.0}
    return Database(StorageSettings.model_validate(settings))


def _launch_programs(stack: Stack, size: StackSize) -> None:
    logs = stack.folder / "logs"

    def worker(pool: str, number: int) -> Program:
        arguments = ["worker", pool]
        name, port_setting = f"{pool}-{number}", "PLATEMAKER_METRICS_PORT"
        return Program(logs, name, arguments, stack.settings, port_setting=port_setting, ready_path="/ready")

    pools = {"prefill": size.prefill, "decode": size.decode}
    programs = [worker(pool, number) for pool, count in pools.items() for number in range(1, count + 1)]
    exporter = ["exporter"]
    setting = "PLATEMAKER_METRICS_PORT"
    programs.append(Program(logs, "exporter", exporter, stack.settings, port_setting=setting, ready_path="/metrics"))
    if size.flower:
        port = FLOWER_PORT if can_bind(FLOWER_PORT) else None
        setting, path = "PLATEMAKER_FLOWER_PORT", "/healthcheck"
        flower = Program(logs, "flower", ["flower"], stack.settings, port_setting=setting, ready_path=path, port=port)
        programs.append(flower)
    for program in programs:
        program.dies_with_us = True
        member = Member(program, program.url)
        member.launch()
        stack.programs.append(member)


def _watch(stack: Stack, record: Record, told: threading.Event, show: Callable[[], None], database: Database) -> None:
    record.write(_everything(stack))
    while not told.wait(LOOK_S):
        changed = [member for member in stack.members if member.look()]
        if changed:
            record.write(_everything(stack))
        for member in changed:
            if member in stack.programs and member.state == State.CRASHED:
                tell_death(database, member)
        for member in stack.programs:
            if member.state == State.CRASHED and not member.was_ready and member.exit_code in OWN_FAULT:
                raise ProgramRefused(member.name, member.last_line())
        show()


def _stop_programs(stack: Stack) -> None:
    for member in stack.programs:
        member.ask_to_stop()
    try:
        for member in stack.programs:
            member.stop()
    except KeyboardInterrupt:
        for member in stack.programs:
            member.server.kill()


def _everything(stack: Stack) -> list[RunningProcess]:
    """`up` itself first."""
    return [*filter(None, [RunningProcess.of("up", os.getpid())]), *stack.processes()]


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM sets the event; a second one kills what is still stopping."""
    told = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
