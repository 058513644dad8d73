"""What commands tell a collector, and what they say where they cannot."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.exits import Exit
from pipeline.local_servers import Valkey
from tasks.traces import root_of
from tests.collector import Collector, collecting
from tests.pipeline.test_cli import Run, environment_of
from tests.pipeline.test_cli import platemaker as platemaker


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def test_a_job_that_is_submitted_again_under_its_key_is_one_trace_with_one_root(
    valkey_server: Valkey, platemaker: Run, collector: Collector
) -> None:
    settings = {"broker_url": valkey_server.url, "traces_url": collector.url}
    assert platemaker("db", "upgrade").returncode == Exit.OK
    ask = ("submit", "contract.txt", "--key", "monday", "--not-before", "1h", "-q", "When?")
    job_id = platemaker(*ask, **settings).stdout.strip()
    assert platemaker(*ask, **settings).stdout.strip() == job_id

    spans = collector.spans()
    root = root_of(job_id)
    first, again = [span for span in spans if span.name == "submit"]
    assert {span.ref.trace_id for span in spans} == {root.trace_id}
    assert (first.ref, first.parent_id, first.values["repeated"]) == (root, 0, False)
    assert again.ref != root and (again.parent_id, again.values["repeated"]) == (root.span_id, True)


@pytest.mark.parametrize("form", [["--format", "jsonl"], ["--format", "table"]])
def test_looking_at_answers_is_told_and_a_job_that_is_not_there_is_not(
    form: list[str], valkey_server: Valkey, platemaker: Run, collector: Collector
) -> None:
    assert platemaker("db", "upgrade").returncode == Exit.OK
    job_id = platemaker("submit", "contract.txt", "-q", "When?", broker_url=valkey_server.url).stdout.strip()

    shown = platemaker("answers", job_id, *form, traces_url=collector.url)
    missing = platemaker("answers", "the-secret-of-a-typist", *form, traces_url=collector.url)

    assert (shown.returncode, missing.returncode) == (Exit.OK, Exit.USAGE)
    (span,) = collector.spans()
    assert (span.name, span.values["rows"], span.values["format"]) == ("report", 1, form[1])
    assert span.parent_id == root_of(job_id).span_id


def test_a_report_that_cannot_be_written_is_named_by_its_class(
    valkey_server: Valkey, platemaker: Run, collector: Collector, tmp_path: Path
) -> None:
    assert platemaker("db", "upgrade").returncode == Exit.OK
    job_id = platemaker("submit", "contract.txt", "-q", "When?", broker_url=valkey_server.url).stdout.strip()
    (tmp_path / "taken.csv").mkdir()

    assert platemaker("report", job_id, "-o", "taken.csv", traces_url=collector.url).returncode == Exit.UNAVAILABLE

    (span,) = collector.spans()
    assert (span.name, span.error) == ("report", "IsADirectoryError")
    assert b"taken" not in b"".join(collector.bodies)


def test_without_the_extra_a_command_that_would_trace_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; from pipeline.cli import main; main()"
    command = [sys.executable, "-c", program, "submit", "contract.txt", "-q", "When?"]
    environment = environment_of(tmp_path, broker_url="redis://host", traces_url="http://127.0.0.1:4318/v1/traces")

    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert ran.returncode == Exit.USAGE
    assert ran.stderr == (
        "A setting is wrong. PLATEMAKER_TRACES_URL: traces need OpenTelemetry. "
        "Run: pip install 'platemaker[traces]', or unset it.\n"
    )
