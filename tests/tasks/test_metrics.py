import threading
from collections.abc import Callable

import pytest
from prometheus_client import generate_latest

from pipeline.submit import Submission
from storage.breaker import BreakerRule
from storage.database import Database
from storage.settings import StorageSettings
from tasks.app import app, configure
from tasks.loading import loaded
from tasks.metrics import REGISTRY, note_answer, note_batch
from tasks.prefill import prepare_snapshot
from tasks.queues import ALL_QUEUES
from tasks.row_metrics import KEEP_S, RowCollector
from tasks.settings import TaskSettings
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]
RULE = BreakerRule(failures=1, window_s=60, cool_down_s=60)


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"platemaker_{name}", labels) or 0.0


class Growth:
    """How much a metric grew since it was first asked for."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def __call__(self, name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return value(name, **labels) - self._before.setdefault(key, value(name, **labels))


def test_queries_are_hits_and_misses_and_tokens_computed_are_the_prefix(place: Workplace, submit_texts: Submit) -> None:
    grown = Growth()
    counted = ("snapshot_queries_total", "snapshot_hits_total")
    for source in ("store", "memory", "copies"):
        grown("snapshot_sources_total", source=source)
    bytes_of = {"tier": "folder", "operation": "put"}
    for name in counted:
        grown(name)
    grown("snapshot_misses_total", reason="new")
    grown("prefill_tokens_total", source="computed")
    grown("tier_bytes_total", **bytes_of)
    grown("chunk_stored_bytes_total", codec="none")
    grown("snapshot_loaded_bytes_total", codec="none")
    made = submit_texts(place, TEXT)
    with place.database.reading() as session:
        document_id = session.connection().exec_driver_sql("SELECT document_id FROM documents").scalar_one()

    assert made.documents == 1
    snapshot_id = prepare_snapshot(place, "default", document_id)
    assert prepare_snapshot(place, "default", document_id) == snapshot_id

    assert [grown(name) for name in counted] == [2, 1]
    assert grown("snapshot_misses_total", reason="new") == 1
    with place.database.reading() as session:
        from storage.snapshots import get_snapshot

        assert snapshot_id is not None
        row = get_snapshot(session, snapshot_id)
    assert grown("prefill_tokens_total", source="computed") == row.num_tokens
    assert grown("chunk_stored_bytes_total", codec="none") == row.size_bytes
    assert grown("tier_bytes_total", **bytes_of) > row.size_bytes  # the text and the manifest too
    with loaded(place, row) as prefix:
        prefix.prove()
    assert grown("snapshot_loaded_bytes_total", codec="none") == row.size_bytes
    assert [grown("snapshot_sources_total", source=source) for source in ("store", "memory", "copies")] == [1, 0, 0]


def test_an_answer_without_tokens_has_no_time_to_first_token() -> None:
    grown = Growth()
    for name in ("first_token_seconds_count", "inter_token_seconds_count", "inter_token_seconds_sum"):
        grown(name)
    grown("answers_total", finish="cancelled")

    note_answer(finish="cancelled", first_token_s=0.0, total_s=9.0, output_tokens=0)
    note_answer(finish="stop", first_token_s=0.5, total_s=0.5, output_tokens=1)
    note_answer(finish="stop", first_token_s=0.5, total_s=1.5, output_tokens=5)

    assert grown("answers_total", finish="cancelled") == 1
    assert grown("first_token_seconds_count") == 2
    assert grown("inter_token_seconds_count") == 1
    assert grown("inter_token_seconds_sum") == pytest.approx(0.25, abs=1e-12, rel=0)


def test_nothing_is_lost_between_threads() -> None:
    grown = Growth()
    grown("decode_batch_questions_sum")

    threads = [threading.Thread(target=lambda: [note_batch(1) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert grown("decode_batch_questions_sum") == 4000


def test_no_label_holds_a_tenant_or_a_text(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)

    told = generate_latest(REGISTRY).decode()

    assert "default" not in told and "Supplier" not in told and "contract-0" not in told


@pytest.fixture
def collector(place: Workplace) -> RowCollector:
    configure(TaskSettings())
    return RowCollector(place.database, app, lease_s=30, breaker_rule=RULE, clock=lambda: 0.0)


def samples(collector: RowCollector) -> dict[tuple[str, str], float]:
    found = {}
    for family in collector.collect():
        for sample in family.samples:
            found[(sample.name, next(iter(sample.labels.values()), ""))] = sample.value
    return found


def test_the_exporter_counts_rows_and_messages(place: Workplace, submit_texts: Submit, collector: RowCollector) -> None:
    submit_texts(place, TEXT, questions=3)

    found = samples(collector)

    assert found["platemaker_items", "queued"] == 3
    assert found["platemaker_exporter_up", "database"] == found["platemaker_exporter_up", "broker"] == 1
    assert {queue for name, queue in found if name == "platemaker_queue_messages"} == {*ALL_QUEUES}
    assert found["platemaker_oldest_waiting_seconds", "read"] >= 0


def test_rows_are_read_once_for_scrapes_close_together(place: Workplace, submit_texts: Submit) -> None:
    now = [0.0]
    collector = RowCollector(place.database, app, lease_s=30, breaker_rule=RULE, clock=lambda: now[0])
    before = samples(collector)
    submit_texts(place, TEXT, questions=3)

    assert samples(collector) == before
    now[0] += KEEP_S + 1
    assert samples(collector)["platemaker_items", "queued"] == 3


def test_a_database_that_does_not_answer_is_said_to_be_down_and_nothing_is_made_up(collector: RowCollector) -> None:
    collector._database = Database(StorageSettings(database_url="sqlite:////nowhere/at/all.db", patience_s=0))

    found = samples(collector)

    assert found["platemaker_exporter_up", "database"] == 0
    assert not any(name == "platemaker_items" for name, _ in found)
