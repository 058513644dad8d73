"""Checks what Platemaker needs, one line each, by really using it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kernels.errors import KernelError
from kernels.settings import KernelSettings
from storage.database import Database
from storage.errors import StorageError
from storage.objects import check_store, open_store
from storage.settings import StorageSettings
from tasks.app import configure
from tasks.errors import TaskError
from tasks.settings import TaskSettings


@dataclass(frozen=True)
class Check:
    """What was checked; `detail` says what was found or what is wrong and what to do."""

    name: str
    ok: bool
    detail: str
    seconds: float


def run_checks(storage: StorageSettings, kernel: KernelSettings, task: TaskSettings) -> Iterator[Check]:
    """Each check as it is done. None depends on another, and none waits for what does not answer."""
    storage = storage.model_copy(update={"patience_s": 0.0})
    yield _check("database", lambda: _database(storage))
    yield _check("store", lambda: _store(storage))
    yield _check("broker", lambda: _broker(task))
    yield _check("conflict", _no_other_kernels)
    yield _check("device", lambda: _device(kernel))
    yield _check("model", lambda: _model(kernel))


def _check(name: str, work: Callable[[], str]) -> Check:
    began = time.perf_counter()
    try:
        ok, detail = True, work()
    except (StorageError, KernelError, TaskError) as exc:
        ok, detail = False, str(exc)
    return Check(name, ok, detail, time.perf_counter() - began)


def _database(settings: StorageSettings) -> str:
    database = Database(settings)
    try:
        database.check_schema()
    finally:
        database.close()
    return f"{database.description}, schema is current"


def _store(settings: StorageSettings) -> str:
    store = open_store(settings)
    try:
        check_store(store)
        return f"{store.describe()}, put and get agree"
    finally:
        store.close()


def _broker(settings: TaskSettings) -> str:
    if settings.broker_url is None:
        return "inside the process (PLATEMAKER_BROKER_URL is not set)"
    from tasks.upkeep import queued_messages  # here: it imports the task modules only when a broker is set

    return f"answers, {queued_messages(configure(settings))} messages waiting"


def _no_other_kernels() -> str:
    from pipeline.guard import check_no_other_kernels

    check_no_other_kernels()
    return "no other package named 'kernels' is installed"


def _device(settings: KernelSettings) -> str:
    from kernels.device import available_devices, pick_device, pick_dtype  # torch: only where it is needed

    device = pick_device(settings.device)
    dtype = str(pick_dtype(settings.dtype, device)).removeprefix("torch.")
    return f"{device} in {dtype} (found: {', '.join(available_devices())})"


def _model(settings: KernelSettings) -> str:
    from tasks.engine import Engine  # torch: only where it is needed

    engine = Engine(settings)
    tokens = len(engine.prompter.prefix_ids(""))
    return (
        f"{engine.name} on {engine.model.device}, context {engine.context_len:,} tokens, of which {tokens} are the "
        "template; its split run equals its whole run"
    )
