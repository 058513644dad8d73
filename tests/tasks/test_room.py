"""A document that does not fit into memory: its items end with the reason, and the worker goes on."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from kernels import memory
from pipeline.submit import Submission
from storage.job_report import job_report
from storage.schema import ItemRow, ItemState, SnapshotRow
from storage.snapshots import get_snapshot
from tasks.decode import answer_waiting
from tasks.loading import loaded
from tasks.prefill import prepare_snapshot
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]


def set_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)


def prepared(place: Workplace, submitted: Submission) -> SnapshotRow | None:
    with place.database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id).where(ItemRow.job_id == submitted.job_id)).first()
    snapshot_id = prepare_snapshot(place, "default", document_id or "")
    if snapshot_id is None:
        return None
    with place.database.reading() as session:
        return get_snapshot(session, snapshot_id)


def report_of(place: Workplace, submitted: Submission) -> list[Any]:
    with place.database.reading() as session:
        return list(job_report(session, "default", submitted.job_id))


def test_a_document_too_large_to_read_ends_its_items_and_no_other(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = submit_texts(place, TEXT), submit_texts(place, TEXT[:300])
    kv_token = place.engine.model.new_kv(1).size_bytes
    need = memory.prefill_need(place.engine.model, 1000, chunk_tokens=256)
    set_free(monkeypatch, need.beyond_weights)
    assert len(place.engine.prompter.prefix_ids(TEXT)) > 1000 + need.codec // kv_token

    assert prepared(place, long) is None
    row = prepared(place, short)

    assert row is not None and not answer_waiting(place, row)
    for item in report_of(place, long):
        assert item.state == ItemState.FAILED
        assert "more memory" in item.error and "are missing" in item.error
    assert all(item.state == ItemState.ANSWERED for item in report_of(place, short))
    set_free(monkeypatch, 1 << 40)  # another job asks again, where there is room
    assert prepared(place, submit_texts(place, TEXT)) is not None


def test_a_snapshot_too_large_to_load_ends_its_items_with_the_reason(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = submit_texts(place, TEXT)
    row = prepared(place, submitted)
    assert row is not None
    set_free(monkeypatch, 1)

    assert not answer_waiting(place, row)

    assert [item.state for item in report_of(place, submitted)] == [ItemState.FAILED] * 3
    assert all("Answering from this document" in item.error for item in report_of(place, submitted))


def test_the_batch_is_halved_until_it_fits(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = prepared(place, submit_texts(place, TEXT, questions=4, max_new_tokens=500))
    assert row is not None
    with loaded(place, row) as prefix:
        assert prefix.max_batch == 4
    model, question = place.engine.model, place.engine.prompter.question_ids("What does article 3 say?")
    need = memory.decode_need(
        model, row.num_tokens, slots=2, slot_tokens=len(question) + 500, step_tokens=5 * len(question)
    )
    set_free(monkeypatch, need.beyond_weights)

    with loaded(place, row) as prefix:
        assert prefix.max_batch == 2


def test_what_is_kept_in_memory_goes_before_a_document_is_refused(
    open_place: Callable[..., Workplace], submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(memory_cache_mb=100)
    row = prepared(place, submit_texts(place, TEXT))
    assert row is not None and not answer_waiting(place, row)
    assert place.residents.keys()
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0 if place.residents.keys() else 1 << 40)

    other = prepared(place, submit_texts(place, TEXT + "And one article more."))

    assert other is not None
    assert not place.residents.keys()
