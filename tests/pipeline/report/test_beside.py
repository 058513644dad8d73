"""Lines that are made in another process are the same as here, whatever becomes of it."""

import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess

import pytest

from pipeline.report.beside import MANY, lines_beside
from pipeline.report.rows import LineInText, lines_in_text
from storage.errors import JobMissing
from tests.pipeline.report.nights import ANSWERS, TENANT, Night


def the_child() -> BaseProcess:
    (child,) = multiprocessing.active_children()
    return child


def kill(child: BaseProcess) -> None:
    os.kill(child.pid or 0, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)


def made_here(night: Night, job_id: str) -> list[LineInText]:
    return list(lines_in_text(night.database, night.store, TENANT, job_id))


def long_job(night: Night) -> str:
    """More than is on its way between two processes at once."""
    sources = [night.source(f"in/{number}.txt", (f"Contract {number}.\n", "x " * 20_000)) for number in range(20)]
    return night.job(sources, {source.name: ANSWERS for source in sources})


def test_lines_of_many_documents_come_from_another_process(night: Night, job_id: str) -> None:
    with lines_beside(night.database, night.store, TENANT, job_id, documents=MANY) as lines:
        child = the_child()
        found = list(lines)

    assert found == made_here(night, job_id)
    assert any(line.line.cell.quote for line in found) and any(line.text for line in found)
    assert multiprocessing.active_children() == []
    with pytest.raises(ValueError, match="closed"):
        child.is_alive()


def test_few_documents_start_no_process(night: Night, job_id: str) -> None:
    with lines_beside(night.database, night.store, TENANT, job_id, documents=MANY - 1) as lines:
        assert list(lines) == made_here(night, job_id)
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("taken", [0, 1, 11])
def test_a_killed_process_is_done_without(night: Night, taken: int) -> None:
    job_id = long_job(night)

    with lines_beside(night.database, night.store, TENANT, job_id, documents=MANY) as lines:
        found = [next(lines) for _ in range(taken)]
        kill(the_child())
        found += lines

    assert found == made_here(night, job_id)


def test_what_the_process_cannot_read_is_told_by_the_one_that_asked(night: Night) -> None:
    with (
        lines_beside(night.database, night.store, TENANT, "none", documents=MANY) as lines,
        pytest.raises(JobMissing),
    ):
        next(lines)


def test_a_report_that_is_given_up_leaves_no_process(night: Night) -> None:
    job_id = long_job(night)

    with pytest.raises(MemoryError), lines_beside(night.database, night.store, TENANT, job_id, documents=MANY) as lines:
        next(lines)
        raise MemoryError

    assert multiprocessing.active_children() == []
