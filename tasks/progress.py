"""What a running task tells Flower and other listeners: ids, numbers and fixed words, never text of a document."""

import logging

import redis
from celery import current_task
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)
UNSENT = (OperationalError, redis.RedisError, OSError)


def send_progress(**fields: int | str) -> None:
    """Sends a `task-progress` event of the task at work; nothing happens outside one, or where no one can be told."""
    if not current_task or current_task.request.called_directly:
        return
    try:
        current_task.send_event("task-progress", retry=False, **fields)
    except UNSENT as exc:
        logger.debug("no progress sent: %s", type(exc).__name__)
