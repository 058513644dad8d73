"""A store that fails in the middle of the work: nothing is lost, and no attempt is counted against a document."""

import logging
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from kernels.settings import KernelSettings
from pipeline.local_servers import SeaweedFS
from pipeline.submit import Submission
from storage import patience
from storage.errors import StoreDenied, StoreFull, StoreUnavailable, StoreUnusable
from storage.job_report import job_report
from storage.progress import job_status
from storage.schema import ItemRow, ItemState, SnapshotRow
from storage.settings import StorageSettings
from storage.snapshots import get_snapshot
from tasks.app import app
from tasks.decode import answer_waiting
from tasks.hints import decode_snapshot, prefill_document
from tasks.prefill import prepare_snapshot
from tasks.settings import TaskSettings
from tasks.workplace import Workplace
from tests.storage.faulty import Fault, Faulty, faulty
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]
SLOW_DOWN = Fault(status=503, code="SlowDown")
DENIED = Fault(status=403, code="InvalidAccessKeyId")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)


@pytest.fixture
def proxy(s3_server: SeaweedFS) -> Iterator[Faulty]:
    with faulty(s3_server.endpoint_url) as told:
        yield told


@pytest.fixture
def open_place(
    s3_server: SeaweedFS, proxy: Faulty, tiny_model: Path, tmp_path: Path
) -> Iterator[Callable[..., Workplace]]:
    opened: list[Workplace] = []
    prefix = secrets.token_hex(8)

    def opener(patience_s: float = 60.0) -> Workplace:
        place = Workplace.open(
            StorageSettings(
                data_dir=tmp_path / "data",
                store_url=f"{s3_server.url}/{prefix}",
                s3_endpoint_url=proxy.endpoint_url,
                s3_access_key_id=SecretStr(s3_server.access_key_id),
                s3_secret_access_key=SecretStr(s3_server.secret_access_key),
                patience_s=patience_s,
            ),
            KernelSettings(model=str(tiny_model), chunk_tokens=256, max_batch=4),
            TaskSettings(lease_s=30, upkeep_s=0.01),
        )
        place.database.upgrade()
        opened.append(place)
        return place

    yield opener
    for place in opened:
        place.close()
        place.store.close()


@pytest.fixture
def place(open_place: Callable[..., Workplace]) -> Workplace:
    return open_place()


@pytest.fixture
def hasty(open_place: Callable[..., Workplace]) -> Workplace:
    """Without patience, every fault is an outage."""
    return open_place(patience_s=0.0)


def document_of(place: Workplace) -> str:
    with place.database.reading() as session:
        return session.scalars(select(ItemRow.document_id)).first() or ""


def states(place: Workplace) -> set[tuple[str, int, str | None]]:
    with place.database.reading() as session:
        return {(item.state, item.attempts, item.error) for item in session.scalars(select(ItemRow))}


def finish(place: Workplace) -> set[str]:
    snapshot_id = prepare_snapshot(place, "default", document_of(place))
    assert snapshot_id is not None
    with place.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
    assert not answer_waiting(place, row)
    return {state for state, _, _ in states(place)}


@pytest.mark.parametrize("fault", [SLOW_DOWN, Fault(status=500), Fault(is_refused=True)], ids=["503", "500", "cut"])
def test_storms_in_prefill_and_load_change_no_answer(
    place: Workplace, submit_texts: Submit, proxy: Faulty, fault: Fault
) -> None:
    calm = submit_texts(place, TEXT)
    assert finish(place) == {ItemState.ANSWERED}

    for text in (TEXT + "One more line.\n", TEXT):
        again = submit_texts(place, text)
        with place.database.reading() as session:
            waiting = select(ItemRow.document_id).where(ItemRow.job_id == again.job_id)
            document_id = session.scalars(waiting).first() or ""
        proxy.fail(fault, times=8)
        snapshot_id = prepare_snapshot(place, "default", document_id)
        with place.database.reading() as session:
            row = get_snapshot(session, snapshot_id or 0)
        proxy.fail(fault, times=8)
        assert not answer_waiting(place, row)

    assert {state for state, _, _ in states(place)} == {ItemState.ANSWERED}
    with place.database.reading() as session:
        answers = [[row.answer for row in job_report(session, "default", job.job_id)] for job in (calm, again)]
    assert answers[0] == answers[1]


def test_an_outage_while_the_snapshot_is_loaded_leaves_the_items_queued(
    hasty: Workplace, submit_texts: Submit, proxy: Faulty
) -> None:
    submitted = submit_texts(hasty, TEXT)
    snapshot_id = prepare_snapshot(hasty, "default", document_of(hasty))
    with hasty.database.reading() as session:
        row = get_snapshot(session, snapshot_id or 0)

    for fault in (SLOW_DOWN, DENIED, SLOW_DOWN, DENIED):
        proxy.fail(fault)
        with pytest.raises(StoreUnusable):
            answer_waiting(hasty, row)
        assert states(hasty) == {(ItemState.QUEUED, 0, None)}

    proxy.heal()
    assert finish(hasty) == {ItemState.ANSWERED}
    with hasty.database.reading() as session:
        assert job_status(session, "default", submitted.job_id).finished_at is not None


@pytest.mark.parametrize(("method", "fault"), [("PUT", SLOW_DOWN), ("PUT", DENIED), ("GET", SLOW_DOWN)])
def test_outages_of_prefill_leave_the_items_queued(
    hasty: Workplace, submit_texts: Submit, proxy: Faulty, method: str, fault: Fault
) -> None:
    submit_texts(hasty, TEXT)
    document_id = document_of(hasty)
    proxy.fail(Fault(status=fault.status, code=fault.code, method=method))

    with pytest.raises(StoreUnusable):
        prepare_snapshot(hasty, "default", document_id)

    assert states(hasty) == {(ItemState.QUEUED, 0, None)}
    proxy.heal()
    assert finish(hasty) == {ItemState.ANSWERED}


def test_outages_are_not_counted_as_attempts(hasty: Workplace, submit_texts: Submit, proxy: Faulty) -> None:
    submit_texts(hasty, TEXT)
    proxy.fail(Fault(status=503, code="SlowDown", method="PUT"))

    for _ in range(hasty.settings.max_attempts + 1):
        with pytest.raises(StoreUnavailable):
            prepare_snapshot(hasty, "default", document_of(hasty))

    proxy.heal()
    assert finish(hasty) == {ItemState.ANSWERED}


@pytest.mark.parametrize("when", ["in the first chunk", "in a later chunk", "in the manifest"])
def test_a_full_disk_leaves_no_part_and_the_next_attempt_is_right(
    hasty: Workplace, submit_texts: Submit, proxy: Faulty, when: str
) -> None:
    submit_texts(hasty, TEXT)
    put = hasty.store.put
    puts: list[str] = []

    def fill(key: str, data: bytes | memoryview) -> None:
        puts.append(key)
        if when == "in the manifest" and key.startswith("manifests/"):
            raise StoreFull
        if when == ("in the first chunk" if len(puts) == 1 else "in a later chunk"):
            raise StoreFull
        put(key, data)

    hasty.store.put = fill  # type: ignore[method-assign]
    with pytest.raises(StoreFull):
        prepare_snapshot(hasty, "default", document_of(hasty))
    hasty.store.put = put  # type: ignore[method-assign]

    assert not [*hasty.store.keys("manifests/")]
    assert finish(hasty) == {ItemState.ANSWERED}


def test_an_outage_is_one_line_without_a_traceback_and_the_next_task_works(
    hasty: Workplace,
    submit_texts: Submit,
    proxy: Faulty,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit_texts(hasty, TEXT)
    document_id = document_of(hasty)
    sent: list[str] = []
    monkeypatch.setattr(app, "workplace", hasty)
    monkeypatch.setattr(app, "send_task", lambda name, args, queue: sent.append(name))
    proxy.fail(DENIED)

    with caplog.at_level(logging.WARNING), pytest.raises(StoreDenied):
        prefill_document("default", document_id)

    (line,) = caplog.records
    assert "PLATEMAKER_S3_SECRET_ACCESS_KEY" in line.getMessage()
    assert line.exc_info is None
    with pytest.raises(StoreDenied):
        hasty.raise_outage()

    proxy.heal()
    prefill_document("default", document_id)
    assert sent == ["platemaker.decode"]
    hasty.raise_outage()
    with hasty.database.reading() as session:
        snapshot_id = session.scalars(select(SnapshotRow.snapshot_id)).one()
    decode_snapshot(snapshot_id)
    assert {state for state, _, _ in states(hasty)} == {ItemState.ANSWERED}
