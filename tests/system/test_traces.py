"""One trace over processes that know nothing of each other but the job's id."""

import signal
from collections import Counter
from pathlib import Path

from tasks.traces import root_of
from tests.collector import collecting
from tests.system.conftest import Installation


def test_processes_of_both_pools_send_one_trace_and_a_worker_told_to_stop_sends_what_it_holds(
    cluster: Installation, tiny_model: Path
) -> None:
    (cluster.folder / "a.txt").write_text("".join(f"Article {n}. Part {n} within {n} days.\n" for n in range(20)))
    with collecting() as collector:
        cluster.environment |= {
            "PLATEMAKER_MODEL": str(tiny_model),
            "PLATEMAKER_TRACES_URL": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "3600000",  # nothing is sent but at the end, or when the queue is full
        }
        workers = [cluster.start("worker", pool) for pool in ("prefill", "decode")]
        job_id = cluster.command("submit", "a.txt", "-q", "What?", "-q", "When?", "--mode", "split").stdout.strip()
        assert cluster.command("watch", job_id).returncode == 0
        cluster.report(job_id)
        assert {span.service for span in collector.spans()} == {"platemaker"}
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        assert [worker.wait(timeout=60) for worker in workers] == [0, 0]

        spans = collector.spans()
    assert {span.ref.trace_id for span in spans} == {root_of(job_id).trace_id}
    assert Counter((span.service, span.name) for span in spans) == {
        ("platemaker", "submit"): 1,
        ("platemaker", "read documents"): 1,
        ("platemaker-prefill", "prefill"): 1,
        ("platemaker-decode", "load"): 1,
        ("platemaker-decode", "answer"): 1,
        ("platemaker", "report"): 1,
    }
