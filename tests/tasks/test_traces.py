"""A job's trace: every process finds it by the job's id, it says what was done, and it holds no text."""

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from pydantic import ValidationError

from kernels.errors import NonFiniteLogits
from pipeline.report.files import write_reports
from pipeline.submit import Submission
from storage.database import utc_now
from storage.job_report import ReportRow, job_report
from storage.schema import ItemState, SnapshotRow
from storage.tiers import Tier
from storage.waiting import waiting_jobs
from storage.ways import Mode
from tasks import prefill as prefill_task
from tasks import trace_export, traces
from tasks.app import app, configure
from tasks.hints import answer_document, decode_snapshot, prefill_document
from tasks.queues import Duty, Pool
from tasks.settings import TaskSettings
from tasks.traces import Span, root_of, send, tracing
from tasks.upkeep import kick_waiting
from tasks.work_spans import MOST_JOBS
from tasks.workplace import Workplace
from tests.collector import Collector, Received, collecting
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]
TASKS: dict[str, Any] = {
    "platemaker.prefill": prefill_document,
    "platemaker.decode": decode_snapshot,
    "platemaker.answer": answer_document,
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


class Pools:
    """Both pools, a process each: messages are handed over by hand, and each process sends its own traces."""

    def __init__(self, opener: Callable[..., Workplace], settings: TaskSettings, patch: pytest.MonkeyPatch) -> None:
        self.settings = settings
        self.place, self.decode = opener(), opener()
        self.place.duty, self.decode.duty = Duty(Pool.PREFILL), Duty(Pool.DECODE)
        self._patch = patch
        self._messages: list[tuple[str, tuple[Any, ...]]] = []
        patch.setattr(app, "send_task", lambda name, args, queue: self._messages.append((name, tuple(args))))

    def work(self) -> None:
        kick_waiting(app, self.place.database, self.place.settings)
        while self._messages:
            name, arguments = self._messages.pop(0)
            place = self.place if name == "platemaker.prefill" else self.decode
            self._patch.setattr(app, "workplace", place)
            with tracing(self.settings, f"platemaker-{place.duty.pool}"):
                TASKS[name](*arguments)

    def report(self, job: Submission, path: Path) -> None:
        with tracing(self.settings):
            write_reports(self.place.database, self.place.store, "default", job.job_id, [path])

    def rows(self, job: Submission) -> list[ReportRow]:
        with self.place.database.reading() as session:
            return list(job_report(session, "default", job.job_id))


@pytest.fixture
def settings(collector: Collector) -> TaskSettings:
    return TaskSettings(traces_url=collector.url)


@pytest.fixture
def pools(open_place: Callable[..., Workplace], settings: TaskSettings, monkeypatch: pytest.MonkeyPatch) -> Pools:
    configure(TaskSettings())
    return Pools(open_place, settings, monkeypatch)


def submitted(pools: Pools, submit_texts: Submit, *texts: str, **options: Any) -> Submission:
    with tracing(pools.settings):
        return submit_texts(pools.place, *texts, **options)


def of_job(collector: Collector, job: Submission) -> list[Received]:
    return [span for span in collector.spans() if span.ref.trace_id == root_of(job.job_id).trace_id]


def named(spans: Sequence[Received], name: str) -> Received:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_one_trace_goes_from_submission_to_report_through_both_pools(
    pools: Pools, collector: Collector, submit_texts: Submit, tmp_path: Path
) -> None:
    job = submitted(pools, submit_texts, TEXT, questions=6, mode=Mode.SPLIT)
    pools.work()
    pools.report(job, tmp_path / "answers.csv")

    spans = collector.spans()
    root = root_of(job.job_id)
    assert {span.ref.trace_id for span in spans} == {root.trace_id}
    assert [(span.service, span.name) for span in spans] == [
        ("platemaker", "submit"),
        ("platemaker", "read documents"),
        ("platemaker-prefill", "prefill"),
        ("platemaker-decode", "load"),
        ("platemaker-decode", "answer"),
        ("platemaker-decode", "answer"),
        ("platemaker", "report"),
    ]
    assert (spans[0].ref, spans[0].parent_id) == (root, 0)
    assert {span.parent_id for span in spans[1:]} == {root.span_id}
    assert len({span.ref.span_id for span in spans}) == len(spans)
    assert all(span.began_ns <= span.ended_ns and span.error is None for span in spans)
    assert {span.values["job_id"] for span in spans} == {job.job_id}


def test_spans_say_what_was_computed_and_what_was_spared(
    pools: Pools, collector: Collector, submit_texts: Submit, tmp_path: Path
) -> None:
    job = submitted(pools, submit_texts, TEXT, questions=6, mode=Mode.SPLIT)
    pools.work()
    pools.report(job, tmp_path / "answers.csv")

    spans = of_job(collector, job)
    with pools.place.database.reading() as session:
        snapshot = session.get(SnapshotRow, 1)
    assert snapshot is not None
    read, load, report = (named(spans, name).values for name in ("prefill", "load", "report"))
    answers = [span.values for span in spans if span.name == "answer"]
    rows = pools.rows(job)
    assert read["tokens_computed"] == snapshot.num_tokens and read["tokens_reused"] == 0
    assert read["bytes"] == load["bytes"] == snapshot.size_bytes
    assert {read["document_id"], load["document_id"]} == {snapshot.document_id}
    assert (read["codec"], read["way"], load["source"]) == ("none", "split", "store")
    assert read["queue_wait_s"] >= 0
    assert [(each["questions"], each["batch"], each["answered"]) for each in answers] == [(4, 4, 4), (2, 2, 2)]
    assert sum(each["output_tokens"] for each in answers) == sum(row.output_tokens or 0 for row in rows)
    assert {(each["way"], each["why"], each["tokens_reused"]) for each in answers} == {
        ("split", "mode", snapshot.num_tokens)
    }
    assert (report["rows"], report["answered"]) == (6, 6)


def test_jobs_that_wait_for_one_document_are_linked_and_each_has_the_whole_in_its_trace(
    pools: Pools, collector: Collector, submit_texts: Submit
) -> None:
    jobs = [submitted(pools, submit_texts, TEXT, questions=count, mode=Mode.SPLIT) for count in (1, 2)]
    pools.work()

    first, second = (of_job(collector, job) for job in jobs)
    for name in ("prefill", "load"):
        done, shared = named(first, name), named(second, name)
        assert done.links == [root_of(jobs[1].job_id)] and "shared" not in done.values
        assert shared.links == [done.ref] and shared.values["shared"] is True
        assert (shared.began_ns, shared.ended_ns) == (done.began_ns, done.ended_ns)
    answers = [named(spans, "answer") for spans in (first, second)]
    assert [(each.values["questions"], each.values["batch"]) for each in answers] == [(1, 3), (2, 3)]
    assert [each.links for each in answers] == [[root_of(jobs[1].job_id)], [root_of(jobs[0].job_id)]]


def test_a_document_whose_snapshot_is_there_shows_that_nothing_was_computed(
    pools: Pools, collector: Collector, submit_texts: Submit
) -> None:
    submitted(pools, submit_texts, TEXT, mode=Mode.SPLIT)
    pools.work()
    again = submitted(pools, submit_texts, TEXT, mode=Mode.SPLIT)
    pools.work()

    read = named(of_job(collector, again), "prefill").values
    assert (read["snapshot"], read["tokens_computed"]) == ("found", 0)
    assert named(of_job(collector, again), "answer").values["answered"] == 3


def test_a_document_read_by_who_answers_shows_its_reading_and_no_load(
    pools: Pools, collector: Collector, submit_texts: Submit
) -> None:
    job = submitted(pools, submit_texts, TEXT, mode=Mode.MONOLITHIC)
    pools.work()

    spans = of_job(collector, job)
    assert [span.name for span in spans] == ["submit", "read documents", "prefill", "answer"]
    assert {span.service for span in spans[2:]} == {"platemaker-decode"}
    assert {(span.values["way"], span.values["why"]) for span in spans[2:]} == {("one_piece", "mode")}
    assert spans[2].values["tokens_computed"] == spans[3].values["tokens_reused"] > 0


def test_nothing_that_is_sent_holds_text_or_names_of_files(
    pools: Pools, collector: Collector, submit_texts: Submit, tmp_path: Path
) -> None:
    job = submitted(pools, submit_texts, TEXT, quote=True, max_new_tokens=24, mode=Mode.SPLIT)
    pools.work()
    pools.report(job, tmp_path / "report-of-the-contract.csv")

    sent = b"".join(collector.bodies)
    rows = pools.rows(job)
    said = [text for row in rows for text in (row.answer, row.quote) if text]
    assert {row.state for row in rows} == {ItemState.ANSWERED} and len(said) == 6
    assert job.job_id.encode() in sent
    asked = ["What does", "Question", "Supplier", "Article", "deliver", "contract-0.txt", "report-of", str(tmp_path)]
    assert not [text for text in (*asked, *said) if text.encode() in sent]


@pytest.mark.parametrize("error", [NonFiniteLogits, RuntimeError("the Supplier's account")])
def test_what_fails_is_named_by_its_class_alone(
    pools: Pools,
    collector: Collector,
    submit_texts: Submit,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception | type[Exception],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(prefill_task, "prefill", fail)
    job = submitted(pools, submit_texts, TEXT, mode=Mode.SPLIT)
    try:
        pools.work()
    except RuntimeError as exc:
        assert exc is error

    read = named(of_job(collector, job), "prefill")
    name = error.__name__ if isinstance(error, type) else type(error).__name__
    assert (read.error, read.values["error.type"]) == (name, name)
    assert b"account" not in b"".join(collector.bodies)


def test_a_snapshot_that_is_damaged_shows_in_the_traces_of_who_waits_for_it(
    pools: Pools, collector: Collector, submit_texts: Submit
) -> None:
    first = submitted(pools, submit_texts, TEXT, mode=Mode.SPLIT)
    pools.work()
    chunk = next(iter(pools.place.store.keys("chunks/")))
    pools.place.store.put(chunk, b"\0" * len(pools.place.store.get(chunk)))

    again = submitted(pools, submit_texts, TEXT, mode=Mode.SPLIT)
    pools.work()

    spans = of_job(collector, again)
    failed = [span.error for span in spans if span.error]
    assert "SnapshotCorrupt" in failed
    assert named([span for span in spans if span.name == "load" and not span.error], "load")
    assert sum(span.values.get("answered", 0) for span in spans if span.name == "answer") == 3
    assert not [span for span in of_job(collector, first) if span.error]


def test_questions_that_a_stopped_worker_gives_back_are_told_as_such(
    pools: Pools, collector: Collector, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(pools, submit_texts, TEXT, max_new_tokens=64, ignore_eos=True, mode=Mode.SPLIT)

    def stop(*_: Any) -> bool:
        pools.decode._end_now()
        return False

    monkeypatch.setattr(pools.decode.heartbeat, "is_cancelled", stop)  # asked before each step
    pools.work()

    answer = named(of_job(collector, job), "answer")
    assert answer.error == "SystemExit" and "answered" not in answer.values
    assert {row.state for row in pools.rows(job)} == {ItemState.QUEUED}


def test_a_collector_that_is_not_there_costs_one_line_in_the_log_and_no_answer(
    pools: Pools, submit_texts: Submit, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    pools.settings = TaskSettings(traces_url=f"http://127.0.0.1:{port}/v1/traces")
    job = submit_texts(pools.place, TEXT, mode=Mode.MONOLITHIC)  # one task, so one process that cannot send

    with caplog.at_level(logging.INFO):
        pools.work()

    assert {row.state for row in pools.rows(job)} == {ItemState.ANSWERED}
    about = [r for r in caplog.records if "trace" in r.name or r.name.startswith(("opentelemetry", "urllib3"))]
    assert [record.levelname for record in about] == ["WARNING"]


def test_it_is_logged_when_a_collector_begins_to_refuse_and_when_it_takes_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    results: list[SpanExportResult | Exception] = [
        SpanExportResult.FAILURE,
        ConnectionError("raised by older versions"),
        SpanExportResult.FAILURE,
        SpanExportResult.SUCCESS,
        SpanExportResult.SUCCESS,
    ]

    class Refusing(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            result = results.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

    told = trace_export._Telling(Refusing())
    for _ in range(5):
        told.export([])

    assert [record.message for record in caplog.records] == [
        "traces cannot be sent to PLATEMAKER_TRACES_URL and are dropped until they can",
        "traces are sent again",
    ]


def test_a_process_does_not_wait_at_its_end_for_a_collector_that_keeps_silent(
    collector: Collector, settings: TaskSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_export, "CLOSE_S", 0.05)
    collector.answers.clear()
    with tracing(settings):
        send(Span("submit"), "job")

    left = [thread for thread in threading.enumerate() if thread.name == "traces"]
    assert left, "it waited until the collector had answered"
    collector.answers.set()
    for thread in left:
        thread.join()


def test_text_is_left_out_of_a_span_whoever_puts_it_there() -> None:
    span = Span("answer")
    span.note(document_id="a" * 64, codec="shuffle-zstd", tokens=3, text="two words", name="Müller", nothing=None)

    assert span.values == {"document_id": "a" * 64, "codec": "shuffle-zstd", "tokens": 3}


def test_the_ids_of_a_trace_follow_from_the_job_alone() -> None:
    """Another version of a worker has to find the same trace."""
    assert [f"{part:x}" for part in root_of("jjvth1y35f3s")] == ["3b7e58204c73372f9a0bae8e3f8e94ad", "454b971809ec049"]
    assert root_of("a") != root_of("b")


def test_of_very_many_jobs_that_wait_the_most_urgent_and_oldest_are_named(
    place: Workplace, submit_texts: Submit
) -> None:
    jobs = [submit_texts(place, TEXT, questions=1) for _ in range(3)]
    fast = submit_texts(place, TEXT, questions=1, tier=Tier.FAST)
    submit_texts(place, TEXT.replace("Supplier", "Purchaser"), questions=1)
    with place.database.reading() as session:
        document_id = next(iter(job_report(session, "default", fast.job_id))).document_id
        of_document = {"tenant": "default", "document_id": str(document_id), "model": place.engine.name}
        found = waiting_jobs(session, **of_document, now=utc_now(), most=3)
        all_of_them = waiting_jobs(session, **of_document, now=utc_now(), most=MOST_JOBS)

    assert [job.job_id for job in found] == [fast.job_id, jobs[0].job_id, jobs[1].job_id]
    assert len(all_of_them) == 4


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "http://key@host:4318/v1/traces", "http://host:4318", "ftp://a/b"])
def test_an_address_that_cannot_be_sent_to_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match="PLATEMAKER_TRACES_URL: must be like"):
        TaskSettings(traces_url=url)


def test_without_the_extra_the_setting_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "NEEDED", ("opentelemetry_missing.sdk",))

    with pytest.raises(ValidationError, match=r"PLATEMAKER_TRACES_URL: .*pip install 'platemaker\[traces\]'"):
        TaskSettings(traces_url="http://127.0.0.1:4318/v1/traces")


def test_without_the_setting_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, redis\n"  # which imports what it finds of it, for metrics of its own
        "def found(): return {name for name in sys.modules if name.startswith('opentelemetry')}\n"
        "before = found()\n"
        "import pipeline.cli, pipeline.run, pipeline.submit, tasks.worker\n"
        "from tasks.settings import TaskSettings\n"
        "from tasks.traces import span, tracing\n"
        "with tracing(TaskSettings()), span('report', 'job', rows=1):\n"
        "    print(sorted(found() - before), 'opentelemetry.sdk.trace' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[] False"
