"""Whether the broker still knows what it was told. One that was restarted without its data, or flushed, does not."""

from datetime import UTC, datetime

from celery import Celery
from kombu.exceptions import OperationalError

from storage.database import utc_now
from tasks.errors import BrokerUnavailable

MARK = "platemaker.remembers-since"
NEVER = datetime.min.replace(tzinfo=UTC)  # before anything was sent


def remembers_since(app: Celery) -> datetime:
    """Since when the broker has lost nothing: a mark in it, made anew by whoever first finds it gone. What was sent
    before is not there any more.

    Raises:
        BrokerUnavailable: the broker does not answer, or refuses the login.
    """
    with app.connection_for_write() as connection:
        if connection.transport.driver_type != "redis":  # inside this process, and forgets with it
            return NEVER
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
            client = connection.default_channel.client
            client.set(MARK, utc_now().isoformat(), nx=True)
            mark = client.get(MARK)
        except (OperationalError, *connection.connection_errors, *connection.channel_errors) as exc:
            raise BrokerUnavailable from exc
    return NEVER if mark is None else datetime.fromisoformat(mark.decode())
