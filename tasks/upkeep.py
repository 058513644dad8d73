"""Finding lost work in the rows. Every worker does it, so no single process must live for it."""

import logging
import threading
from datetime import timedelta

from kombu.exceptions import OperationalError

from storage.database import Database, utc_now
from storage.errors import StorageError
from storage.items import recover_items, take_unkicked
from tasks.app import PlatemakerApp
from tasks.errors import BrokerUnavailable
from tasks.queues import ALL_QUEUES
from tasks.settings import TaskSettings

logger = logging.getLogger(__name__)
KICKS_AT_ONCE = 500
PATIENCE_WHILE_BUSY = 20  # leases a document waits before it is sent again although messages are still queued


def kick_waiting(app: PlatemakerApp, database: Database, settings: TaskSettings) -> int:
    """Sends a prefill message for each document with queued items for which none was sent lately; returns how many.

    Raises:
        BrokerUnavailable: nothing could be sent; the rows stay and the next upkeep tries again.
    """
    patience = settings.lease_s * (PATIENCE_WHILE_BUSY if queued_messages(app) else 1)
    now = utc_now()
    try:
        with database.writing() as session:
            documents = take_unkicked(
                session, now=now, kicked_before=now - timedelta(seconds=patience), limit=KICKS_AT_ONCE
            )
            for document in documents:
                app.send_task("platemaker.prefill", args=[document.tenant, document.document_id])
    except OperationalError as exc:
        raise BrokerUnavailable from exc
    return len(documents)


def queued_messages(app: PlatemakerApp) -> int:
    """Messages in all queues that no worker has taken.

    Raises:
        BrokerUnavailable: the broker does not answer, or refuses the login.
    """
    with app.connection_for_write() as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
            channel = connection.default_channel
            return sum(channel.queue_declare(queue=name, passive=False).message_count for name in ALL_QUEUES)
        except (OperationalError, *connection.connection_errors, *connection.channel_errors) as exc:
            raise BrokerUnavailable from exc


class Upkeep:
    """A thread that puts back what dead workers held and sends again what got lost."""

    def __init__(self, app: PlatemakerApp, database: Database, settings: TaskSettings) -> None:
        self._app = app
        self._database = database
        self._settings = settings
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def once(self) -> None:
        with self._database.writing() as session:
            recovered = recover_items(session, now=utc_now(), max_attempts=self._settings.max_attempts)
        if recovered:
            logger.warning("items put back", extra={"count": recovered})
        kick_waiting(self._app, self._database, self._settings)

    def _run(self) -> None:
        while not self._stopped.wait(self._settings.upkeep_s):
            try:
                self.once()
            except (StorageError, BrokerUnavailable) as exc:
                logger.warning("upkeep failed, will try again", extra={"reason": str(exc)})
