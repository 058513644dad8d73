"""How urgent work is, and of which kind. By itself, so that a command line can say it without a database library."""

from enum import StrEnum


class Tier(StrEnum):
    """Of a job. Fast ones are taken first and answered in small batches."""

    FAST = "fast"
    BATCH = "batch"


class Stage(StrEnum):
    """What is to be done with a document: its snapshot made, its questions answered from that, or both in one piece."""

    READ = "read"
    ANSWER = "answer"
    WHOLE = "whole"
