"""Exit codes of every command; README.md lists them."""

from enum import IntEnum


class Exit(IntEnum):
    OK = 0  # every row answered
    INCOMPLETE = 1  # finished, but some rows hold an error instead of an answer
    USAGE = 2  # the command or a question file is wrong; nothing was begun
    NOTHING_DONE = 3  # no row was answered
    UNAVAILABLE = 4  # model, database, broker or object store cannot be used
    CANCELLED = 5  # the job was cancelled before it was done
    INTERRUPTED = 130  # stopped from the keyboard
