"""Looking for the answers of many documents in a process of its own, beside the one that writes them down."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple

from pipeline.report.evidence import Evidence, find_all

MANY = 200  # documents, from which on the process is worth its start

Find = Callable[["Search"], Callable[[], list[Evidence | None]]]


class Search(NamedTuple):
    text: str
    page_starts: tuple[int, ...]
    answers: list[str]

    def found(self) -> list[Evidence | None]:
        return find_all(self.text, self.page_starts, self.answers)


def find_here(search: Search) -> Callable[[], list[Evidence | None]]:
    return search.found


@contextmanager
def finder(documents: int) -> Iterator[Find]:
    """What takes a search up and returns how to get at its result, for a report of so many documents."""
    if documents < MANY:
        yield find_here
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_ignore_interrupts) as pool:

        def find(search: Search) -> Callable[[], list[Evidence | None]]:
            try:
                begun = pool.submit(find_all, *search)
            except BrokenProcessPool:
                return search.found
            return lambda: _result(begun, search)

        yield find


def _result(begun: "Future[list[Evidence | None]]", search: Search) -> list[Evidence | None]:
    try:
        return begun.result()
    except BrokenProcessPool:  # somebody killed it
        return search.found()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the keyboard: the process that writes decides
