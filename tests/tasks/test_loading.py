"""From the row to the KV: memory first, then the store, and proved before it counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sqlalchemy import select

import tasks.loading
from kernels.kv import PrefixKV
from storage.database import utc_now
from storage.forget import forget_document
from storage.schema import ChunkRow, ItemRow, SnapshotRow, SnapshotState
from storage.snapshots import get_manifest, get_snapshot
from tasks.app import app
from tasks.decode import answer_waiting
from tasks.loading import loaded, resident_key
from tasks.prefill import prepare_snapshot
from tasks.residents import ResidentKey, Residents
from tasks.upkeep import Upkeep
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT
from tests.tasks.test_decode import answers_of, flip, prepared

Submit = Callable[..., Any]


@pytest.fixture
def place(open_place: Callable[..., Workplace]) -> Workplace:
    return open_place(memory_cache_mb=64)


@pytest.fixture
def reads(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the parts that are read from the store."""
    found: list[str] = []
    read_into = place.store.read_into
    monkeypatch.setattr(
        place.store, "read_into", lambda key, start, into: (found.append(key), read_into(key, start, into))[1]
    )
    return found


def look(place: Workplace, row: SnapshotRow) -> SnapshotRow:
    with place.database.reading() as session:
        return get_snapshot(session, row.snapshot_id)


def kv_of(size_bytes: int) -> PrefixKV:
    kv = PrefixKV(1)
    kv.write(0, 0, torch.zeros(1, 1, size_bytes // 8), torch.zeros(1, 1, size_bytes // 8))
    return kv


def test_a_second_task_of_the_process_reads_nothing_again(
    place: Workplace, submit_texts: Submit, reads: list[str]
) -> None:
    first = submit_texts(place, TEXT)
    row = prepared(place)
    assert not answer_waiting(place, row)
    assert reads
    reads.clear()
    second = submit_texts(place, TEXT)

    assert not answer_waiting(place, row)

    assert reads == []
    assert answers_of(place, second.job_id) == answers_of(place, first.job_id)


def test_another_publication_of_the_snapshot_is_loaded_anew(
    place: Workplace, submit_texts: Submit, reads: list[str]
) -> None:
    submit_texts(place, TEXT)
    row = prepared(place)
    assert not answer_waiting(place, row)
    reads.clear()
    row.manifest_sha256 = "0" * 64  # as another worker may have written it meanwhile
    submit_texts(place, TEXT)

    assert answer_waiting(place, row)


def test_a_forgotten_document_leaves_the_memory(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    row = prepared(place)
    assert not answer_waiting(place, row)
    upkeep = Upkeep(app, place)
    upkeep._drop_residents()
    assert place.residents.keys() == [resident_key(row)]

    forget_document(place.database, place.store, tenant="default", document_id=row.document_id, now=utc_now())
    upkeep._drop_residents()

    assert place.residents.keys() == []


def test_the_least_recently_used_goes_first() -> None:
    residents = Residents(1000)
    one, two, three = (ResidentKey(number, "sha") for number in (1, 2, 3))
    residents.keep(one, kv_of(400))
    residents.keep(two, kv_of(400))
    assert residents.get(one) is not None

    residents.keep(three, kv_of(400))

    assert residents.keys() == [one, three]
    assert residents.size_bytes == 800


def test_what_is_larger_than_the_budget_is_not_kept_and_drives_nothing_out() -> None:
    residents = Residents(1000)
    one = ResidentKey(1, "sha")
    residents.keep(one, kv_of(400))

    residents.keep(ResidentKey(2, "sha"), kv_of(1200))

    assert residents.keys() == [one]
    residents.drop([one])
    assert residents.keys() == []


def test_a_probe_that_does_not_hold_takes_the_snapshot_out_of_use(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is as stored, and still the model computes something else: another build of it, say."""
    submitted = submit_texts(place, TEXT)
    row = prepared(place)
    manifest = get_manifest(place.store, row)
    wrong = manifest.model_copy(update={"probe_logits": tuple(value + 0.1 for value in manifest.probe_logits)})
    monkeypatch.setattr(tasks.loading, "get_manifest", lambda _store, _row: wrong)

    assert answer_waiting(place, row)

    assert look(place, row).state == SnapshotState.QUARANTINED
    assert answers_of(place, submitted.job_id) == [None, None, None]
    monkeypatch.undo()
    assert not answer_waiting(place, prepared(place))


def test_the_probe_runs_once_in_a_process(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_texts(place, TEXT)
    row = prepared(place)
    probed: list[int] = []
    check = tasks.loading.check_probe
    monkeypatch.setattr(tasks.loading, "check_probe", lambda *args: (probed.append(1), check(*args))[1])
    for _ in range(2):
        with loaded(place, row) as prefix:
            prefix.prove()
            prefix.prove()
        place.residents.drop([resident_key(row)])

    assert probed == [1]


def test_other_tokens_than_the_snapshots_are_noticed(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update of the tokenizer's library: the snapshot is sound, but it is not this prompt's any more."""
    submitted = submit_texts(place, TEXT)
    row = prepared(place)
    prompter = place.engine.prompter
    original = prompter.prefix_ids
    monkeypatch.setattr(prompter, "prefix_ids", lambda text: original(text)[:-2])

    assert answer_waiting(place, row)

    assert look(place, row).state == SnapshotState.READY
    assert answers_of(place, submitted.job_id) == [None, None, None]
    assert not answer_waiting(place, prepared(place))
    assert all(answers_of(place, submitted.job_id))


def test_nothing_computed_from_a_damaged_part_is_kept(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    row = prepared(place)
    with place.database.reading() as session:
        chunk = session.scalars(select(ChunkRow).order_by(ChunkRow.size_bytes.desc())).first()
    assert chunk is not None
    flip(place.store, f"chunks/{chunk.chunk_key}.safetensors")

    assert answer_waiting(place, row)

    assert place.residents.keys() == []
    assert place.proved == set()


def test_layers_are_waited_for_one_by_one(place: Workplace, submit_texts: Submit) -> None:
    """The first layer can be computed on while the second is still on its way."""
    submit_texts(place, TEXT)
    row = prepared(place)
    with loaded(place, row) as prefix:
        prefix.prove()
        whole = {layer: prefix.kv.layer(layer).keys.clone() for layer in prefix.kv.keys}
    with loaded(place, row) as prefix:
        for layer, keys in whole.items():
            assert torch.equal(prefix.kv.layer(layer).keys, keys)


def test_documents_share_the_chunk_of_the_system_prompt(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT, "Quite another text. " * 30)
    with place.database.reading() as session:
        documents = sorted(set(session.scalars(select(ItemRow.document_id))))
    for document_id in documents:
        prepare_snapshot(place, "default", document_id)

    with place.database.reading() as session:
        rows = session.scalars(select(SnapshotRow).order_by(SnapshotRow.snapshot_id)).all()
        sizes = list(session.scalars(select(ChunkRow.num_tokens)))
    head = place.engine.prompter.head_tokens
    assert sizes.count(head) == 1
    assert [row.num_tokens - row.computed_tokens for row in rows] == [0, head]
