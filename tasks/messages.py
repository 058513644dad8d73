"""Which messages a worker takes. What is none of ours gets one line in the log and is taken off the queue."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer
from kombu.transport.redis import Channel, Transport

from tasks.metrics import REFUSED

logger = logging.getLogger(__name__)
LONGEST_TEXT = 255
LARGEST_ID = 2**63 - 1


class MessageRefused(Exception):
    """The message does not fit its task."""


def check_arguments(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Arguments are ids: positive numbers, or short printable text, as the task's annotations say.

    Raises:
        MessageRefused: with a reason that repeats nothing of the message.
    """
    signature = inspect.signature(run)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        raise MessageRefused("the number or the names of its arguments are wrong") from None
    for name, value in bound.arguments.items():
        wanted = signature.parameters[name].annotation
        if wanted is int:
            fits = type(value) is int and 0 < value <= LARGEST_ID
        else:
            fits = wanted is str and type(value) is str and 0 < len(value) <= LONGEST_TEXT and value.isprintable()
        if not fits:
            raise MessageRefused(f"its argument {name} is not of the kind that the task takes")


def note_refused(reason: str, detail: str) -> None:
    logger.error("Message refused: %s.", detail)
    REFUSED.labels(reason).inc()


class StrictConsumer(Consumer):  # type: ignore[misc] # celery is untyped
    """Celery's own prints the whole message and a traceback for some that it cannot read; by others it is ended, and
    they then end the next worker."""

    def create_task_handler(self, **options: Any) -> Callable[[Any], None]:
        handle = super().create_task_handler(**options)
        lost = (*self.connection_errors, *self.channel_errors)

        def check_and_handle(message: Any) -> None:
            try:
                if "task" in message.headers:
                    args, kwargs, _ = message.decode()
                    has_id = isinstance(message.headers.get("id"), str)
                    if not has_id or not isinstance(args, list) or not isinstance(kwargs, dict):
                        raise MessageRefused
                handle(message)
            except lost:
                raise
            except Exception:
                self._refuse(message, "invalid", "it is not made as a task's message is")

        return check_and_handle

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self._refuse(message, "not_a_task", "it is no task of Celery's")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        self._refuse(message, "unknown_task", "there is no such task here")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self._refuse(message, "invalid", "it is not made as a task's message is")

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._refuse(message, "content", "it is not JSON, the only content that is taken")

    def _refuse(self, message: Any, reason: str, detail: str) -> None:
        note_refused(reason, detail)
        message.ack_log_error(logger, self.connection_errors)


class StrictChannel(Channel):  # type: ignore[misc] # kombu is untyped
    """Kombu's own ends the worker when an entry of a queue is no message at all."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (ValueError, KeyError, TypeError, AttributeError):
            note_refused("not_a_message", "an entry of the queue is no message")
            return None


class StrictTransport(Transport):  # type: ignore[misc] # kombu is untyped
    Channel = StrictChannel
