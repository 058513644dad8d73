"""The Celery app. Importing it imports no torch; the tasks load their model when they first run."""

import logging
import os
import signal
import ssl
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from kombu import Exchange, Queue

from kernels.errors import RankLost
from storage.errors import OUTAGES, SnapshotMissing
from tasks.messages import MessageRefused, check_arguments, note_refused
from tasks.queues import ALL_QUEUES
from tasks.settings import TaskSettings

if TYPE_CHECKING:
    from tasks.workplace import Workplace

logger = logging.getLogger(__name__)
EMBEDDED_BROKER = "memory://"


class WorkTask(Task):  # type: ignore[misc] # celery is untyped
    """A task whose work stays in the rows when the store or the database cannot be used."""

    throws = (*OUTAGES, SnapshotMissing)  # no traceback: the sentence says it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = app.require_workplace()
        try:
            check_arguments(self.run, args, kwargs)
        except MessageRefused as exc:
            note_refused("arguments", f"{self.name}: {exc}")
            return None
        try:
            result = super().__call__(*args, **kwargs)
        except OUTAGES as exc:
            place.note_outage(exc)
            raise
        except RankLost as exc:  # what it held is given back; whoever started this process starts another
            logger.critical("%s", exc)
            os.kill(os.getpid(), signal.SIGTERM)
            return None
        except SystemExit:
            if place.draining.is_set():  # an orderly way out, which Celery would take for a broken worker
                return None
            raise
        place.note_work()
        return result


class PlatemakerApp(Celery):  # type: ignore[misc] # celery is untyped
    """Celery plus the workplace that its tasks use; set by whoever starts a worker in this process."""

    workplace: "Workplace | None" = None

    def require_workplace(self) -> "Workplace":
        assert self.workplace is not None, "a worker was started without a workplace"
        return self.workplace


app = PlatemakerApp("platemaker", include=["tasks.hints", "tasks.ping"], task_cls=WorkTask)
app.set_default()  # else a worker on a thread of its own runs the tasks as plain ones, of an app that Celery makes up
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_queues=[Queue(name, Exchange(name), routing_key=name) for name in ALL_QUEUES],
    task_default_queue=ALL_QUEUES[-1],  # whoever sends names one
    task_create_missing_queues=False,
    # A message is acknowledged when it is taken: what a dead worker held is found again in the rows, so the
    # broker's own redelivery, which repeats tasks longer than its time-out, is not needed.
    task_acks_late=False,
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    task_publish_retry_policy={"max_retries": 2, "interval_start": 0, "interval_step": 0.5, "interval_max": 1},
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    worker_send_task_events=True,
    worker_consumer="tasks.messages:StrictConsumer",
    enable_utc=True,
    timezone="UTC",
)


def configure(settings: TaskSettings) -> PlatemakerApp:
    """Points the app at the broker of the settings, or at the one inside this process. What was connected to another
    one before is let go of."""
    app.conf.update(broker_settings(settings))
    app._after_fork()  # Celery's only way to forget its pools of connections and producers
    return app


def broker_settings(settings: TaskSettings) -> dict[str, Any]:
    """Celery's settings of the broker. They hold its password."""
    if settings.broker_url is None:
        return {
            "broker_url": EMBEDDED_BROKER,
            "broker_transport": None,
            "broker_transport_options": {"polling_interval": 0.02},
            "broker_use_ssl": None,
        }
    url = settings.broker_url.get_secret_value()
    options = {"queue_order_strategy": "priority", "visibility_timeout": settings.visibility_timeout_s}
    encryption: dict[str, Any] | None = None
    if url.startswith("rediss://"):
        encryption = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
        if settings.tls_ca_file is not None:
            encryption["ssl_ca_certs"] = str(settings.tls_ca_file)
    return {
        "broker_url": url,
        "broker_transport": "tasks.messages:StrictTransport",
        "broker_transport_options": options,
        "broker_use_ssl": encryption,
    }
