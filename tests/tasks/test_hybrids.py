"""Models with windows or recurrent layers through the whole way: stored, cut off, shared, damaged, answered."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import tasks.chain
from kernels.prefill import prefill
from kernels.settings import KernelSettings
from storage.documents import get_text
from storage.progress import job_readings
from storage.schema import ItemRow
from storage.settings import StorageSettings
from storage.snapshots import get_manifest
from storage.verification import chunk_digests, verify_snapshot
from tasks.decode import answer_waiting
from tasks.prefill import prepare_snapshot
from tasks.settings import TaskSettings
from tasks.workplace import Workplace
from tests.kernels.families import SUPPORTED_FAMILIES, random_model
from tests.tasks.conftest import TEXT
from tests.tasks.test_decode import answers_of, flip, prepared

Submit = Callable[..., Any]
Open = Callable[..., Workplace]
HYBRIDS = ("mistral", "gemma3", "lfm2", "falcon-h1", "mamba2")


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the tiny model's tokenizer and a small random model of a family."""
    folder = tmp_path_factory.mktemp(request.param)
    for path in tiny_model.glob("tokenizer*"):
        shutil.copy(path, folder)
    for path in tiny_model.glob("chat_template*"):
        shutil.copy(path, folder)
    config = copy.deepcopy(SUPPORTED_FAMILIES[request.param])
    config.vocab_size, config.max_position_embeddings = 258, 4096
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, None
    random_model(config, 3).save_pretrained(folder)
    return folder


@pytest.fixture
def open_place(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(tasks.chain, "STATE_TOKENS", 512)
    opened: list[Workplace] = []

    def opener(**kernel: Any) -> Workplace:
        place = Workplace.open(
            StorageSettings(data_dir=tmp_path / "data"),
            KernelSettings(model=str(hybrid), chunk_tokens=256, max_batch=2, **kernel),
            TaskSettings(memory_cache_mb=0),
        )
        place.database.upgrade()
        opened.append(place)
        return place

    yield opener
    for place in opened:
        place.close()
        place.store.close()


def documents(place: Workplace) -> list[str]:
    with place.database.reading() as session:
        return sorted(set(session.scalars(select(ItemRow.document_id))))


def test_a_cut_off_prefill_goes_on_behind_a_state_and_a_damaged_state_is_noticed(
    open_place: Open, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, place = open_place(), open_place()
    submitted = submit_texts(place, TEXT)
    (document_id,) = documents(place)
    ids = place.engine.prompter.prefix_ids(get_text(place.store, "default", document_id))
    expected = prefill(place.engine.model, ids, stops=place.engine.chunk_stops(len(ids)))
    leave = Workplace.leave_if_stopping
    stored: list[int] = []

    def die_after_five(self: Workplace) -> None:
        stored.append(1)
        if len(stored) == 6:
            raise SystemExit("killed")
        leave(self)

    with monkeypatch.context() as patch:
        patch.setattr(Workplace, "leave_if_stopping", die_after_five)
        with pytest.raises(SystemExit):
            prepare_snapshot(dying, "default", document_id)

    row = prepared(place)
    with place.database.reading() as session:
        (reading,) = job_readings(session, "default", submitted.job_id)
    assert reading.reused_tokens == 1024  # behind the head and 256 tokens each: 1024 is the last state before the end
    manifest = get_manifest(place.store, row)
    assert [entry.stop for entry in manifest.states or ()] == [512, 1024, 1536, row.num_tokens]
    assert manifest.probe_logits == pytest.approx(expected.probe.logits, abs=1e-3)

    state = (manifest.states or ())[-1].object_key
    flip(place.store, state)
    with place.database.reading() as session:
        digests = chunk_digests(session, row.snapshot_id)
    assert [problem for problem in verify_snapshot(place.store, row, digests).problems if state in problem]
    assert answer_waiting(place, row)
    assert not answer_waiting(place, prepared(place))
    assert all(answer is not None for answer in answers_of(place, submitted.job_id))


def test_an_amended_document_goes_on_behind_the_last_state_before_the_change(
    open_place: Open, submit_texts: Submit
) -> None:
    amended = TEXT.replace("Article 20.", "Article 20, as amended.")
    place = open_place()
    submit_texts(place, TEXT)
    first = prepared(place)
    assert not answer_waiting(place, first)
    submitted = submit_texts(place, amended)
    (document_id,) = {*documents(place)} - {first.document_id}

    snapshot_id = prepare_snapshot(place, "default", document_id)

    assert snapshot_id is not None
    with place.database.reading() as session:
        (reading,) = job_readings(session, "default", submitted.job_id)
    assert reading.reused_tokens == 1024


@pytest.mark.parametrize("codec", ["int8", "shuffle-zstd"])
def test_states_are_exact_under_every_codec(open_place: Open, submit_texts: Submit, codec: str) -> None:
    place = open_place(codec=codec, codec_max_error=10.0)
    submitted = submit_texts(place, TEXT)
    row = prepared(place)

    assert not answer_waiting(place, row)

    assert get_manifest(place.store, row).codec == codec
    assert all(answer is not None for answer in answers_of(place, submitted.job_id))


def test_a_longer_document_has_no_larger_state(open_place: Open) -> None:
    engine = open_place().engine
    sizes = set()
    for text in (TEXT[:900], TEXT):
        ids = engine.prompter.prefix_ids(text)
        kv = prefill(engine.model, ids, stops=engine.chunk_stops(len(ids))).kv
        sizes.add(sum(tensor.nbytes for tensor in kv.state().values()))
    assert len(sizes) == 1
