import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from kernels.kv import PrefixKV
from kernels.steps import PrefillStep
from pipeline.submit import Submission
from storage.database import utc_now
from storage.documents import text_key
from storage.job_report import job_report
from storage.manifest import Producer
from storage.progress import job_readings, job_status
from storage.schema import ChunkRow, ItemRow, ItemState, SnapshotRow, SnapshotState
from storage.verification import chunk_digests, verify_snapshot
from tasks.chain import ChunkChain
from tasks.prefill import prepare_snapshot
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Open = Callable[..., Workplace]
Submit = Callable[..., Submission]


def document_of(place: Workplace) -> str:
    with place.database.reading() as session:
        return session.scalars(select(ItemRow.document_id)).first() or ""


def test_one_prefill_however_many_workers_are_asked(open_place: Open, submit_texts: Submit) -> None:
    places = [open_place() for _ in range(4)]
    submitted = submit_texts(places[0], TEXT)
    document_id = document_of(places[0])
    computed: list[int] = []
    for place in places:
        assert place.engine.model.kv_shapes
        forward = place.engine.model.forward
        place.engine.model.forward = (  # type: ignore[method-assign] # counts the tokens that are really read
            lambda step, ids, keep, run=forward: (
                computed.append(len(ids) * isinstance(step, PrefillStep)),
                run(step, ids, keep),
            )[1]
        )
    barrier = threading.Barrier(len(places))

    def work(place: Workplace) -> int | None:
        barrier.wait()
        return prepare_snapshot(place, "default", document_id)

    with ThreadPoolExecutor(len(places)) as pool:
        list(pool.map(work, places))

    with places[0].database.reading() as session:
        (reading,) = job_readings(session, "default", submitted.job_id)
        assert session.scalar(select(func.count()).select_from(SnapshotRow)) == 1
    assert sum(computed) == reading.num_tokens == reading.computed_tokens


def test_a_writer_that_was_frozen_leaves_the_snapshot_of_the_one_that_overtook_it(
    open_place: Open, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, other = open_place(), open_place()
    frozen.heartbeat.stop()
    submit_texts(frozen, TEXT)
    other.engine.producer = Producer(version="another", device="cuda", torch="another")
    store = ChunkChain.store
    published: list[int | None] = []

    def overtaken(self: ChunkChain, pool: Any, kv: PrefixKV, start: int, stop: int) -> None:
        store(self, pool, kv, start, stop)
        monkeypatch.setattr(ChunkChain, "store", store)
        with other.database.writing() as session:
            session.execute(update(SnapshotRow).values(lease_until=utc_now() - timedelta(hours=1)))
        published.append(prepare_snapshot(other, "default", document_of(other)))

    monkeypatch.setattr(ChunkChain, "store", overtaken)

    assert prepare_snapshot(frozen, "default", document_of(frozen)) is None
    with frozen.database.reading() as session:
        row = session.scalars(select(SnapshotRow)).one()
        digests = chunk_digests(session, row.snapshot_id)
    assert (row.state, published) == (SnapshotState.READY, [row.snapshot_id])
    assert not verify_snapshot(frozen.store, row, digests).problems


def test_a_second_job_finds_the_snapshot(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    first = prepare_snapshot(place, "default", document_of(place))
    again = submit_texts(place, TEXT)

    second = prepare_snapshot(place, "default", document_of(place))

    assert first == second
    with place.database.reading() as session:
        (reading,) = job_readings(session, "default", again.job_id)
    assert (reading.way, reading.computed_tokens) == ("found", 0)


def test_a_prefill_cut_off_goes_on_behind_its_stored_chunks(
    open_place: Open, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, place = open_place(), open_place()
    submitted = submit_texts(place, TEXT)
    document_id = document_of(place)
    write = PrefixKV.write
    died_at = 1024

    def write_until_death(self: PrefixKV, layer: int, start: int, k: object, v: object) -> None:
        if start >= died_at:
            raise SystemExit("killed")
        write(self, layer, start, k, v)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(PrefixKV, "write", write_until_death)
        with pytest.raises(SystemExit):
            prepare_snapshot(dying, "default", document_id)

    assert prepare_snapshot(place, "default", document_id) is not None
    with place.database.reading() as session:
        (reading,) = job_readings(session, "default", submitted.job_id)
    assert reading.reused_tokens == died_at
    assert reading.computed_tokens == reading.num_tokens - died_at


def test_an_amended_document_reuses_the_chunks_before_the_change(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    prepare_snapshot(place, "default", document_of(place))
    amended = submit_texts(place, TEXT.replace("Article 20.", "Article 20, as amended."))
    with place.database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id).where(ItemRow.job_id == amended.job_id)).first()

    prepare_snapshot(place, "default", document_id or "")

    with place.database.reading() as session:
        (reading,) = job_readings(session, "default", amended.job_id)
    assert 0 < reading.computed_tokens < reading.num_tokens
    assert reading.reused_tokens % 256 == 0


def test_a_damaged_chunk_is_not_built_upon(open_place: Open, submit_texts: Submit) -> None:
    place = open_place()
    submit_texts(place, TEXT)
    prepare_snapshot(place, "default", document_of(place))
    with place.database.reading() as session:
        chunk = session.scalars(select(ChunkRow).order_by(ChunkRow.created_at)).first()
    assert chunk is not None
    key = f"chunks/{chunk.chunk_key}.safetensors"
    data = bytearray(place.store.get(key))
    data[len(data) // 2] ^= 1
    place.store.put(key, bytes(data))
    amended = submit_texts(place, TEXT + "One more line.\n")
    with place.database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id).where(ItemRow.job_id == amended.job_id)).first()

    assert prepare_snapshot(place, "default", document_id or "") is not None

    with place.database.reading() as session:
        (reading,) = job_readings(session, "default", amended.job_id)
    assert reading.reused_tokens == 0


def test_a_document_beyond_the_context_is_refused_before_any_weight_is_loaded(
    place: Workplace, submit_texts: Submit
) -> None:
    submitted = submit_texts(place, TEXT * 4)

    assert prepare_snapshot(place, "default", document_of(place)) is None

    assert "model" not in vars(place.engine)
    with place.database.reading() as session:
        errors = set(session.scalars(select(ItemRow.error)))
        status = job_status(session, "default", submitted.job_id)
    assert all(error and "the model takes 4,096" in error and "--split sections" in error for error in errors)
    assert status.items == {ItemState.FAILED: 3}
    assert status.finished_at is not None


def test_a_document_that_keeps_failing_is_set_aside(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = submit_texts(place, TEXT)
    document_id = document_of(place)

    def burst(*_: object, **__: object) -> None:
        raise RuntimeError("a surprise")

    monkeypatch.setattr("tasks.prefill.prefill", burst)
    for _ in range(place.settings.max_attempts):
        with pytest.raises(RuntimeError):
            prepare_snapshot(place, "default", document_id)

    assert prepare_snapshot(place, "default", document_id) is None
    with place.database.reading() as session:
        status = job_status(session, "default", submitted.job_id)
        state = session.scalars(select(SnapshotRow.state)).one()
    assert status.items == {ItemState.FAILED: 3}
    assert state == SnapshotState.FAILED


def test_a_document_whose_text_is_gone_says_so(place: Workplace, submit_texts: Submit) -> None:
    submitted = submit_texts(place, TEXT)
    document_id = document_of(place)
    place.store.delete(text_key("default", document_id))

    assert prepare_snapshot(place, "default", document_id) is None

    with place.database.reading() as session:
        rows = list(job_report(session, "default", submitted.job_id))
    assert {row.error_code for row in rows} == {"text_missing"}
