"""A worker whose model lies on two ranks, beside one whose model lies on one: the same snapshots, the same answers."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from sqlalchemy import select

from kernels.errors import RankLost
from kernels.parallel import ParallelModel
from pipeline.submit import Submission
from storage.job_report import job_report
from storage.schema import ChunkRow, ItemRow, ItemState, SnapshotRow
from storage.snapshots import get_snapshot
from tasks.decode import answer_waiting
from tasks.engine import Engine
from tasks.prefill import prepare_snapshot
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]


def work_off(place: Workplace, submitted: Submission) -> SnapshotRow:
    with place.database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id).where(ItemRow.job_id == submitted.job_id)).first()
    assert document_id is not None
    snapshot_id = prepare_snapshot(place, "default", document_id)
    assert snapshot_id is not None
    with place.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
    assert not answer_waiting(place, row)
    return row


def test_two_ranks_share_snapshots_with_one_and_give_work_back_when_one_is_lost(
    open_place: Callable[..., Workplace], submit_texts: Submit
) -> None:
    """One test, since starting a rank takes seconds."""
    one, two = open_place(), open_place()
    settings = one.engine.settings.model_copy(update={"device": "cpu", "dtype": "float32"})
    one.engine, two.engine = Engine(settings), Engine(settings.model_copy(update={"tensor_parallel": 2}))
    model = two.engine.model
    assert isinstance(model, ParallelModel)
    submitted = [submit_texts(two, TEXT)]
    stored_by_two = work_off(two, submitted[-1])
    with two.database.reading() as session:
        chunks = session.scalars(select(ChunkRow)).all()

    submitted.append(submit_texts(one, TEXT))
    found_by_one = work_off(one, submitted[-1])
    submitted.append(submit_texts(two, TEXT))
    work_off(two, submitted[-1])

    assert found_by_one.snapshot_id == stored_by_two.snapshot_id
    with one.database.reading() as session:
        assert len(session.scalars(select(ChunkRow)).all()) == len(chunks) > 2
        reports = [list(job_report(session, "default", each.job_id)) for each in submitted]
    answers = [[row.answer for row in report] for report in reports]
    assert all(row.state == ItemState.ANSWERED for report in reports for row in report)
    for before, after in pairwise(answers):
        assert before == after

    lost = submit_texts(two, TEXT + "One more article.\n")
    model.processes[0].kill()
    model.processes[0].join()
    with pytest.raises(RankLost, match="One of the 2 processes"):
        work_off(two, lost)
    with two.database.reading() as session:
        assert [row.state for row in job_report(session, "default", lost.job_id)] == [ItemState.QUEUED] * 3
    model.close()
