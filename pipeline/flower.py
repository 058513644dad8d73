"""Flower with our configuration: loopback, a password, ids and numbers only."""

import atexit
import importlib.util
import logging
import secrets
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from celery import Celery
from celery.events.state import Task as TaskSeen
from kombu import Queue
from rich.console import Console

from pipeline.errors import PipelineError
from pipeline.settings import PipelineSettings
from tasks.app import broker_settings
from tasks.queues import ALL_QUEUES
from tasks.settings import TaskSettings

COLUMNS = "name,state,result,received,runtime,worker,uuid,args"
PROGRESS = ("document_id", "tokens", "snapshot", "batch")  # what `tasks.progress` sends
INSPECT_TIMEOUT_MS = 10_000.0
PURGE_OFFLINE_S = 60
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class FlowerNotInstalled(PipelineError):
    """Flower is not installed. Run: pip install 'platemaker[flower]'"""


def serve_flower(task: TaskSettings, settings: PipelineSettings, console: Console) -> None:
    """Until it is told to stop.

    Raises:
        FlowerNotInstalled: the package is missing.
    """
    if importlib.util.find_spec("flower") is None:
        raise FlowerNotInstalled
    from flower.app import Flower
    from flower.command import extract_settings
    from flower.urls import settings as tornado_settings
    from tornado.options import options

    logging.getLogger("tornado.access").setLevel(logging.ERROR)
    login = _login(settings, console)
    for name, value in {
        "address": settings.flower_address,
        "port": settings.flower_port,
        "basic_auth": [login],
        "url_prefix": settings.flower_url_prefix,
        "inspect_timeout": INSPECT_TIMEOUT_MS,
        "purge_offline_workers": PURGE_OFFLINE_S,
        "tasks_columns": COLUMNS,
        "format_task": describe,
        "read_only": True,
    }.items():
        setattr(options, name, value)
    extract_settings()
    _know_progress()
    # Not the workers' app: Flower would import its tasks, and with them torch.
    app = Celery("platemaker", set_as_current=False)
    # By the URL alone, from which Flower learns where the queues are; their names, for as long as no worker told them.
    app.conf.update(
        {**broker_settings(task), "broker_transport": None},
        task_queues=[Queue(name) for name in ALL_QUEUES],
        task_default_queue=ALL_QUEUES[-1],
        accept_content=["json"],
        enable_utc=True,
        timezone="UTC",
    )
    flower = Flower(capp=app, options=options, **tornado_settings)
    atexit.register(flower.stop)
    signal.signal(signal.SIGTERM, _leave)
    flower.start_http_server()
    prefix = f"/{settings.flower_url_prefix.strip('/')}" if settings.flower_url_prefix else ""
    where = f"http://{settings.flower_address}:{settings.flower_port}{prefix}"
    console.print(f"Flower is at {where}", highlight=False)
    if settings.flower_address not in LOOPBACK:
        console.print(
            "Its /metrics and /healthcheck answer without the password, to everybody who reaches this address.",
            style="yellow",
            highlight=False,
        )
    with suppress(KeyboardInterrupt, SystemExit):
        flower.start()


def _know_progress() -> None:
    """Flower copies tasks by the fields that Celery's events have; others would be lost."""
    for name in PROGRESS:
        setattr(TaskSeen, name, None)
    TaskSeen._fields = (*TaskSeen._fields, *PROGRESS)


def describe(task: Any) -> Any:
    """Puts what the task told on its way into the column of results, which it has none of."""
    told = {name: getattr(task, name, None) for name in PROGRESS}
    parts = []
    if told["document_id"]:
        parts.append(f"document {str(told['document_id'])[:12]}")
    if told["tokens"] is not None:
        parts.append(f"{int(told['tokens']):,} tokens")
    if told["snapshot"]:
        parts.append(str(told["snapshot"]))
    if told["batch"] is not None:
        parts.append(f"{int(told['batch'])} questions")
    task.result = ", ".join(parts)
    return task


def _login(settings: PipelineSettings, console: Console) -> str:
    if settings.flower_auth is not None:
        return settings.flower_auth.get_secret_value()
    made = f"platemaker:{secrets.token_urlsafe(12)}"
    console.print(
        f"Log in as platemaker with {made.partition(':')[2]} (for this run; PLATEMAKER_FLOWER_AUTH sets your own).",
        highlight=False,
    )
    return made


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough
    sys.exit(0)
