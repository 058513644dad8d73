"""A thread, or a process, that runs schedules when they are due."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.errors import PipelineError
from pipeline.nightly.runs import Nightly, Ran
from storage.database import utc_now
from storage.errors import StorageError
from tasks.errors import BrokerUnavailable

logger = logging.getLogger(__name__)


def beat(
    nightly: Nightly, *, every_s: float, stopped: threading.Event, on_run: Callable[[Ran], None] = lambda _ran: None
) -> None:
    """Looks every so often until `stopped`; what goes wrong is logged and tried again."""
    while True:
        try:
            for ran in nightly.tick(utc_now()):
                logger.info("schedule submitted", extra={"job_id": ran.job_id})
                on_run(ran)
        except (StorageError, PipelineError, BrokerUnavailable, OSError) as exc:
            logger.warning("Schedules will be looked at again: %s", exc)
        if stopped.wait(every_s):
            return


@contextmanager
def beating(nightly: Nightly, *, every_s: float) -> Iterator[None]:
    """Runs schedules on a thread of this process while the block runs."""
    stopped = threading.Event()
    thread = threading.Thread(
        target=beat, args=(nightly,), kwargs={"every_s": every_s, "stopped": stopped}, name="beat", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
