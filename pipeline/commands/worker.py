"""`worker`: a process of a pool."""

from typing import Annotated

import typer

from pipeline.commands.opening import device_settings
from tasks.queues import Duty, Pool, Tiers


def worker(
    pool: Annotated[Pool, typer.Argument(help="Which work it takes.", show_default=False)],
    tier: Annotated[Tiers, typer.Option(help="Of which tiers; with all, fast work is taken first.")] = Tiers.ALL,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Start a worker of a pool; Ctrl-C or SIGTERM stops it softly, a second one at once."""
    from tasks.settings import TaskSettings

    task = TaskSettings()
    if task.broker_url is None:
        raise typer.BadParameter("a worker needs a broker: set PLATEMAKER_BROKER_URL.")

    kernel = device_settings()

    from pipeline.guard import check_no_other_kernels  # only now: a wrong setting is told before torch is loaded
    from pipeline.nightly.beat import beating
    from pipeline.nightly.runs import Nightly
    from pipeline.settings import PipelineSettings
    from storage.objects import check_store
    from storage.settings import StorageSettings
    from tasks.app import configure
    from tasks.traces import tracing
    from tasks.worker import serve
    from tasks.workplace import Workplace

    check_no_other_kernels()
    storage = StorageSettings()
    place = Workplace.open(storage, kernel, task, Duty(pool, tier))
    place.database.check_schema()
    check_store(place.store)
    _ = place.engine.model  # a worker whose model is wrong does not start
    nightly = Nightly(place.database, place.store, PipelineSettings(), storage)
    with tracing(task, f"platemaker-{pool.value}"), beating(nightly, every_s=task.upkeep_s):
        serve(configure(task), place, log_level=log_level)
