"""The lines of a report about many documents are made in a process of their own, beside the one that writes them."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from multiprocessing.connection import Connection

from pipeline.report.rows import LineInText, lines_in_text
from storage.database import Database
from storage.objects import ObjectStore, open_store
from storage.settings import StorageSettings

MANY = 200  # documents, from which on the process is worth its start


@contextmanager
def lines_beside(
    database: Database, store: ObjectStore, tenant: str, job_id: str, *, documents: int
) -> Iterator[Iterator[LineInText]]:
    """What `lines_in_text` gives, of a job of so many documents."""
    if documents < MANY:
        yield lines_in_text(database, store, tenant, job_id)
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    maker = context.Process(target=_make, args=(there, database.settings, tenant, job_id), daemon=True)
    maker.start()
    there.close()  # so that the end of the process is the end of the pipe
    try:
        yield _received(here, lambda rest: lines_in_text(database, store, tenant, job_id, sources=rest))
    finally:
        here.close()
        maker.terminate()  # at its end, or what it makes is no longer wanted; it writes nothing
        maker.join()
        maker.close()


def _received(pipe: Connection, make_here: Callable[[range], Iterator[LineInText]]) -> Iterator[LineInText]:
    """The lines of one document after the other. What the process does not give, whatever became of it, is made
    here: an error that it met is met again where somebody can be told."""
    position = -1
    try:
        while lines := pipe.recv():
            yield from lines
            position = lines[-1].line.row.source_position
    except (EOFError, OSError):  # nothing more, or half of a message
        yield from make_here(range(position + 1, sys.maxsize))


def _make(pipe: Connection, settings: StorageSettings, tenant: str, job_id: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the keyboard: the process that writes decides
    try:
        database, store = Database(settings), open_store(settings)
        lines = lines_in_text(database, store, tenant, job_id)
        for _, document in groupby(lines, key=lambda found: found.line.row.source_position):
            pipe.send(list(document))  # waits where it is not taken: no more than a few documents are on their way
        pipe.send([])
    except Exception:
        pipe.close()  # before its end, or nobody listens any more
