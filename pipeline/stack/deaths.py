"""Tells the rows how a worker ended: without it they wait for its leases, and nobody knows the signal."""

import logging
import signal
from contextlib import suppress

from pipeline.stack.member import Member
from storage.database import Database, utc_now
from storage.deaths import note_death
from storage.errors import StorageError
from tasks.registry import worker_name

logger = logging.getLogger(__name__)


def tell_death(database: Database, member: Member) -> None:
    """Of a program that has just ended. Where the database cannot be used, its leases run out as anywhere else."""
    try:
        with database.writing() as session:
            note_death(session, worker_name(member.server.pid), ending(member.exit_code or 0), now=utc_now())
    except StorageError as exc:
        logger.warning("How %s ended is not noted: %s", member.name, exc)


def ending(exit_code: int) -> str:
    """A process's end in words: the signal's name, or its status."""
    with suppress(ValueError):
        return signal.Signals(-exit_code).name
    return f"status {exit_code}"
