"""Quotes that are looked for in another process are the same as here, whatever becomes of it."""

import multiprocessing
import os
import signal

import pytest

from pipeline.report.evidence import Evidence
from pipeline.report.finder import MANY, Search, find_here, finder

TEXT = "The Customer pays the invoice within 60 days of the invoice date.\nThe seat of arbitration is London."
SEARCH = Search(
    TEXT, (0, 66), ["Payment is due within 60 days of the invoice date.", "Nothing of it.", "arbitration is London"]
)


def test_many_documents_are_searched_in_another_process() -> None:
    expected = find_here(SEARCH)()
    assert (
        expected[1] is None and isinstance(expected[0], Evidence) and expected[2] is not None and expected[2].page == 2
    )

    with finder(MANY) as find:
        assert multiprocessing.active_children() == []
        results = [find(SEARCH) for _ in range(3)]
        (child,) = multiprocessing.active_children()

        assert child.pid != os.getpid()
        assert [result() for result in results] == [expected] * 3
    assert not child.is_alive()


def test_few_documents_start_no_process() -> None:
    with finder(MANY - 1) as find:
        assert find is find_here


@pytest.mark.parametrize("when", ["before it is asked", "while it is asked"])
def test_a_killed_process_is_done_without(when: str) -> None:
    with finder(MANY) as find:
        first = find(SEARCH)
        first()
        (child,) = multiprocessing.active_children()
        if when == "while it is asked":
            os.kill(child.pid or 0, signal.SIGSTOP)
            later = find(SEARCH)
            os.kill(child.pid or 0, signal.SIGKILL)
        else:
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
            later = find(SEARCH)

        assert later() == find_here(SEARCH)()
        assert find(SEARCH)() == first()
