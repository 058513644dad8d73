"""What most commands open before they do anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from kernels.settings import KernelSettings
    from pipeline.settings import PipelineSettings
    from storage.database import Database
    from storage.objects import ObjectStore

FIRST_KICKS = 20  # enough to begin with; upkeep sends the others, and a person does not wait for it


@contextmanager
def opened() -> "Iterator[tuple[Database, ObjectStore, PipelineSettings]]":
    """Database, store and settings of a command that looks at what is there."""
    from pipeline.settings import PipelineSettings
    from storage.database import Database
    from storage.objects import open_store
    from storage.settings import StorageSettings

    storage = StorageSettings()
    database = Database(storage)
    try:
        database.check_schema()
        store = open_store(storage)
        yield database, store, PipelineSettings()
        store.close()
    finally:
        database.close()


@contextmanager
def traced() -> Iterator[None]:
    """A command that does something for a job, which its trace shows where PLATEMAKER_TRACES_URL is set."""
    from tasks.settings import TaskSettings
    from tasks.traces import tracing

    with tracing(TaskSettings()):
        yield


def kick(database: "Database", *, first: str | None = None) -> None:
    """Sends what waits to the workers now, the documents of the job `first` before others, where there is a broker;
    without it they find the rows by themselves."""
    from tasks.app import configure
    from tasks.errors import BrokerUnavailable
    from tasks.settings import TaskSettings
    from tasks.upkeep import kick_waiting

    task = TaskSettings()
    if task.broker_url is None:
        return
    try:
        kick_waiting(configure(task), database, task, limit=FIRST_KICKS, first=first)
    except BrokerUnavailable as exc:
        Console(stderr=True).print(f"{exc} The job is safe: workers will find it.", style="yellow", highlight=False)


def device_settings(model: str | None = None) -> "KernelSettings":
    """Those of the device floor, with the cards pinned; call it before anything imports torch.

    Raises:
        CardsConflict: the operator pinned other cards.
    """
    from kernels.cards import pin_cards
    from kernels.settings import KernelSettings

    settings = KernelSettings(model=model) if model else KernelSettings()
    pin_cards(settings.cards, settings.tensor_parallel)
    return settings
