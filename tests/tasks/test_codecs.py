"""Jobs answered under each codec, and what their manifests say of it."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
from sqlalchemy import select

from kernels.codecs import CODECS
from kernels.settings import CodecName
from pipeline.submit import Submission
from storage.job_report import job_report
from storage.manifest import Manifest
from storage.progress import job_readings, job_status
from storage.schema import ChunkRow, ItemRow, ItemState, SnapshotRow, SnapshotState
from storage.snapshots import get_manifest, get_snapshot
from tasks.decode import answer_waiting
from tasks.engine import Engine
from tasks.prefill import prepare_snapshot
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]
LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]
ANYTHING = 1e9  # the tiny model is random, and its logits suffer more than a real one's


@pytest.fixture
def use(place: Workplace) -> Callable[..., Workplace]:
    """The workplace with other settings of the codec, as a process started with them."""

    def changed(codec: str, **settings: Any) -> Workplace:
        model = place.engine.model
        made = place.engine.settings.model_copy(update={"codec": codec, "codec_max_error": ANYTHING, **settings})
        place.engine = Engine(made)
        place.engine.model = model
        return place

    return changed


def prepared(place: Workplace, job_id: str) -> tuple[SnapshotRow, Manifest]:
    with place.database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id).where(ItemRow.job_id == job_id)).first() or ""
    snapshot_id = prepare_snapshot(place, "default", document_id)
    assert snapshot_id is not None
    with place.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
    return row, get_manifest(place.store, row)


def answers_of(place: Workplace, job_id: str) -> list[str | None]:
    with place.database.reading() as session:
        return [row.answer for row in job_report(session, "default", job_id)]


@pytest.mark.parametrize("codec", get_args(CodecName))
def test_a_job_is_answered_under_each_codec(use: Callable[..., Workplace], submit_texts: Submit, codec: str) -> None:
    place = use(codec)
    submitted = submit_texts(place, TEXT)
    row, manifest = prepared(place, submitted.job_id)

    assert not answer_waiting(place, row)

    with place.database.reading() as session:
        assert job_status(session, "default", submitted.job_id).items == {ItemState.ANSWERED: 3}
    assert manifest.codec == codec == row.fields["codec"]
    if codec in LOSSY:
        assert manifest.codec_error is not None
        assert manifest.codec_error.logit_rel_error > 0
        assert 0 <= manifest.codec_error.top1_agreement <= 1
    else:
        assert manifest.codec_error is None


def test_a_lossless_codec_answers_like_none(use: Callable[..., Workplace], submit_texts: Submit) -> None:
    found, probes = [], []
    for codec in ("none", "shuffle-zstd"):
        place = use(codec)
        submitted = submit_texts(place, TEXT)
        row, manifest = prepared(place, submitted.job_id)
        answer_waiting(place, row)
        found.append(answers_of(place, submitted.job_id))
        probes.append(manifest.probe_logits)

    assert found[0] == found[1]
    assert probes[0] == probes[1]


def test_snapshots_under_two_codecs_have_different_fingerprints_and_chunks(
    use: Callable[..., Workplace], submit_texts: Submit
) -> None:
    made = []
    for codec in get_args(CodecName):
        place = use(codec)
        made.append(prepared(place, submit_texts(place, TEXT).job_id))

    assert len({row.fingerprint for row, _ in made}) == len(CODECS)
    keys = [entry.key for _, manifest in made for entry in manifest.chunks]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_codec_that_loses_too_much_gives_way_to_exact_chunks(
    use: Callable[..., Workplace], submit_texts: Submit, codec: str
) -> None:
    place = use("none")
    submitted = submit_texts(place, TEXT)
    exact_row, exact = prepared(place, submitted.job_id)
    answer_waiting(place, exact_row)
    place = use(codec, codec_max_error=0.0)
    again = submit_texts(place, TEXT)

    row, manifest = prepared(place, again.job_id)

    assert row.fields["codec"] == codec
    assert (manifest.codec, manifest.codec_error) == ("none", None)
    assert manifest.chunks == exact.chunks
    assert not answer_waiting(place, row)
    assert answers_of(place, again.job_id) == answers_of(place, submitted.job_id)


def test_exact_chunks_are_written_where_nobody_had_them(use: Callable[..., Workplace], submit_texts: Submit) -> None:
    place = use("int8", codec_max_error=0.0)
    submitted = submit_texts(place, TEXT)

    row, manifest = prepared(place, submitted.job_id)

    assert manifest.codec == "none"
    assert not answer_waiting(place, row)
    place = use("none")
    later = submit_texts(place, TEXT + "One more line.\n")
    prepared(place, later.job_id)
    with place.database.reading() as session:
        (reading,) = job_readings(session, "default", later.job_id)
    assert reading.reused_tokens > 0


def test_an_amended_document_is_measured_against_exact_numbers(
    use: Callable[..., Workplace], submit_texts: Submit
) -> None:
    """It shares the stored chunks of its beginning, and is computed as if they were not there."""
    place = use("int8")
    _, first = prepared(place, submit_texts(place, TEXT).job_id)
    with place.database.reading() as session:
        stored_at = {row.chunk_key: row.created_at for row in session.scalars(select(ChunkRow))}
    amended = submit_texts(place, TEXT + "One more line.\n")

    _, manifest = prepared(place, amended.job_id)

    shared = len(first.chunks) - 1
    assert manifest.chunks[:shared] == first.chunks[:shared]
    with place.database.reading() as session:
        (reading,) = job_readings(session, "default", amended.job_id)
        now_at = {row.chunk_key: row.created_at for row in session.scalars(select(ChunkRow))}
    assert reading.computed_tokens == reading.num_tokens
    assert all(now_at[entry.key] == stored_at[entry.key] for entry in first.chunks[:shared])


def test_a_damaged_lossy_chunk_is_stored_again(use: Callable[..., Workplace], submit_texts: Submit) -> None:
    place = use("int8")
    submitted = submit_texts(place, TEXT)
    row, manifest = prepared(place, submitted.job_id)
    place.store.put(manifest.chunks[1].object_key, b"damage")

    assert answer_waiting(place, row)
    row, again = prepared(place, submitted.job_id)

    assert row.state == SnapshotState.READY
    assert again == manifest
    assert not answer_waiting(place, row)


def test_a_kv_that_is_not_finite_fails_the_document_under_a_lossy_codec(
    use: Callable[..., Workplace], submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = use("int8")
    submitted = submit_texts(place, TEXT)
    embeddings = place.engine.model.hf.get_input_embeddings()
    monkeypatch.setattr(embeddings, "forward", lambda ids: type(embeddings).forward(embeddings, ids) * float("nan"))
    with place.database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id)).first() or ""

    assert prepare_snapshot(place, "default", document_id) is None

    with place.database.reading() as session:
        status = job_status(session, "default", submitted.job_id)
        errors = set(session.scalars(select(ItemRow.error)))
    assert status.items == {ItemState.FAILED: 3}
    assert all(error and "PLATEMAKER_DTYPE=float32" in error for error in errors)
