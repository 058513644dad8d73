"""Starting workers: as a process of a cluster, or as a thread inside `platemaker run`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.signals import worker_shutting_down

import tasks.hints
import tasks.ping  # noqa: F401 # the tasks register themselves
from tasks.app import PlatemakerApp
from tasks.device_metrics import DeviceCollector
from tasks.health import Health, HttpServer
from tasks.metrics import REGISTRY
from tasks.queues import ALL_QUEUES
from tasks.registry import Registration
from tasks.upkeep import Upkeep
from tasks.workplace import Workplace


def serve(app: PlatemakerApp, place: Workplace, *, log_level: str) -> None:
    """Works until it is told to stop. One task at a time: a process holds one model.

    A thread pool of one leaves the main thread free to answer pings; forking would break a loaded model. The first
    SIGTERM lets answers under way finish, as `Workplace.drain` says; a second one ends them.

    Raises:
        OtherModelServed, PortTaken: it cannot begin.
    """
    app.workplace = place

    def drain(**_: Any) -> None:
        place.drain()

    with _watched(place):
        registration = Registration(place)
        registration.start()
        worker_shutting_down.connect(drain)
        upkeep = Upkeep(app, place)
        upkeep.start()
        try:
            app.worker_main(
                [
                    "worker",
                    "--pool=threads",
                    "--concurrency=1",
                    f"--queues={','.join(place.duty.queues)}",
                    f"--loglevel={log_level}",
                    f"--hostname={place.duty.pool}-{place.worker_name.rpartition(':')[2]}@%h",
                    "--without-mingle",
                    "--without-gossip",
                ]
            )
        finally:
            worker_shutting_down.disconnect(drain)
            place.stop()
            upkeep.stop()
            registration.stop()
            place.close()


@contextmanager
def _watched(place: Workplace) -> Iterator[None]:
    """Serves the metrics and the health of this worker inside the block, where a port is set for it."""
    if not place.settings.metrics_port:
        yield
        return
    REGISTRY.register(DeviceCollector())
    health = Health(place)
    server = HttpServer(place.settings.metrics_address, place.settings.metrics_port, REGISTRY, health)
    server.start()
    try:
        yield
    finally:
        health.close()
        server.close()


@contextmanager
def embedded(app: PlatemakerApp, place: Workplace) -> Iterator[None]:
    """Runs the same tasks on a thread of this process while the block runs."""
    app.workplace = place
    worker = app.WorkController(
        app=app,
        pool="solo",
        concurrency=1,
        queues=list(ALL_QUEUES),
        loglevel="ERROR",
        without_heartbeat=True,
        without_mingle=True,
        without_gossip=True,
    )
    thread = threading.Thread(target=worker.start, name="worker", daemon=True)
    thread.start()
    upkeep = Upkeep(app, place)
    upkeep.start()
    try:
        yield
    finally:
        # The rows hold everything, so the thread need not come to its end, but it must not be inside the model when
        # the interpreter goes down. A task stops between two steps and gives back what it holds.
        place.stop()
        upkeep.stop()
        place.close()
