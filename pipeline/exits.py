"""Exit codes of every command; README.md lists them."""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.report.summary import Summary


class Exit(IntEnum):
    OK = 0  # every row answered
    INCOMPLETE = 1  # finished, but some rows hold an error instead of an answer
    USAGE = 2  # the command or a question file is wrong; nothing was begun
    NOTHING_DONE = 3  # no row was answered
    UNAVAILABLE = 4  # model, database, broker or object store cannot be used
    CANCELLED = 5  # the job was cancelled before it was done
    QUEUE_FULL = 6  # too much is queued already; nothing was submitted
    INTERRUPTED = 130  # stopped from the keyboard


def exit_code(summary: "Summary") -> Exit:
    """Of a command that ends with a job."""
    if summary.cancelled:
        return Exit.CANCELLED
    if summary.answered == summary.rows:
        return Exit.OK
    return Exit.INCOMPLETE if summary.answered else Exit.NOTHING_DONE
