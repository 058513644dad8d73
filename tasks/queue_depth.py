"""How many messages wait in each queue."""

from celery import Celery
from kombu.exceptions import OperationalError

from tasks.errors import BrokerUnavailable
from tasks.queues import ALL_QUEUES


def queue_depths(app: Celery) -> dict[str, int]:
    """Messages that no worker has taken, by queue.

    Raises:
        BrokerUnavailable: the broker does not answer, or refuses the login.
    """
    with app.connection_for_write() as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
            channel = connection.default_channel
            return {name: channel.queue_declare(queue=name, passive=False).message_count for name in ALL_QUEUES}
        except (OperationalError, *connection.connection_errors, *connection.channel_errors) as exc:
            raise BrokerUnavailable from exc
