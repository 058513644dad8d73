"""`platemaker run`, as a person calls it."""

import csv
import json
import signal
import time
from pathlib import Path

import pytest

from pipeline.report.text_sinks import guarded
from tests.system.conftest import SAMPLES, Installation


def contract(folder: Path, name: str, articles: int = 12) -> Path:
    path = folder / name
    path.write_text("".join(f"Article {n}. The Supplier delivers part {n} in {n} days.\n" for n in range(articles)))
    return path


def test_the_second_run_reads_nothing(laptop: Installation) -> None:
    file = contract(laptop.folder, "a.txt")
    first = laptop.json("run", file, "-q", "What?", "-q", "When?", "--json")
    second = laptop.json("run", file, "-q", "What?", "-q", "When?", "--json")

    assert (first["snapshots_made"], first["answered"]) == (1, 2)
    assert first["tokens_without_sharing"] == 2 * first["tokens_read"] > 0
    assert (second["snapshots_found"], second["tokens_read"], second["prefill_s"]) == (1, 0, 0.0)


def test_csv_and_jsonl_hold_a_row_per_file_and_question_in_order(laptop: Installation) -> None:
    files = [contract(laptop.folder, "b.txt"), contract(laptop.folder, "a.txt", 5)]
    done = laptop.command("run", *files, "-q", "What?", "-q", "When?", "--out", "out")
    assert done.returncode == 0, done.stderr

    with (laptop.folder / "out" / "answers.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (laptop.folder / "out" / "answers.jsonl").read_text().splitlines()]
    expected = [(str(file), question) for file in files for question in ("What?", "When?")]
    assert [(row["document"], row["question"]) for row in rows] == expected
    assert [(line["document"], line["question"]) for line in lines] == expected
    assert [row["answer"] for row in rows] == [guarded(line["answer"]) for line in lines]


def test_bad_input_gets_its_own_rows_and_stops_nothing(laptop: Installation) -> None:
    good = contract(laptop.folder, "good.txt")
    empty = laptop.folder / "empty.txt"
    empty.touch()
    strange = laptop.folder / "sheet.xyz"
    strange.write_text("?")
    long = contract(laptop.folder, "long.txt", 200)
    questions = laptop.folder / "questions.yaml"
    questions.write_text("- {id: a, question: 'What?'}\n- {id: b, question: ''}\n- {id: a, question: 'Again?'}\n")

    done = laptop.command("run", good, empty, strange, "missing.txt", long, "--questions", questions)

    rows = [json.loads(line) for line in (laptop.folder / "review" / "answers.jsonl").read_text().splitlines()]
    assert done.returncode == 1
    assert len(rows) == 5 * 3
    codes = {(Path(row["document"]).name, row["question_id"]): row["error_code"] for row in rows}
    assert codes["good.txt", "a"] is None
    assert codes["good.txt", "b"] == "empty_question"
    assert codes["good.txt", "a#3"] == "duplicate_question"
    assert codes["empty.txt", "a"] == "empty_document"
    assert codes["sheet.xyz", "a"] == "unsupported_type"
    assert codes["missing.txt", "a"] == "missing_file"
    assert codes["long.txt", "a"] == "too_long"


def test_when_nothing_can_be_read_the_exit_code_says_so(laptop: Installation) -> None:
    assert laptop.command("run", "missing.pdf", "-q", "What?").returncode == 3


def test_a_missing_model_is_one_sentence(laptop: Installation) -> None:
    laptop.environment["PLATEMAKER_MODEL"] = "/nowhere/model"

    done = laptop.command("run", contract(laptop.folder, "a.txt"), "-q", "What?")

    assert done.returncode == 4
    assert "No model at '/nowhere/model'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_split_is_refused_before_anything_is_queued(laptop: Installation) -> None:
    folder = Path(laptop.environment["PLATEMAKER_MODEL"])
    stretched = laptop.folder / "stretched"
    stretched.mkdir()
    for file in folder.iterdir():
        (stretched / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (stretched / "config.json").write_text(json.dumps(config))
    laptop.environment["PLATEMAKER_MODEL"] = str(stretched)

    done = laptop.command("run", contract(laptop.folder, "a.txt"), "-q", "What?")

    assert done.returncode == 4
    assert "dynamic NTK RoPE" in done.stderr
    assert "no items" not in laptop.command("jobs").stdout


def test_ctrl_c_leaves_a_report_and_no_open_work(laptop: Installation) -> None:
    files = [contract(laptop.folder, f"{n}.txt", 20 + n) for n in range(60)]
    process = laptop.start("run", *map(str, files), "-q", "What?", "-q", "When?", "--max-tokens", "300")
    laptop.wait_until(lambda: "answered" in laptop.command("jobs").stdout, limit_s=60, what="the first answer")
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)

    rows = (laptop.folder / "review" / "answers.jsonl").read_text().splitlines()
    assert process.returncode == 130
    assert len(rows) == 120
    assert "queued" not in laptop.command("jobs").stdout


def test_a_killed_run_resumes_from_its_chunks(laptop: Installation) -> None:
    laptop.environment["PLATEMAKER_CHUNK_TOKENS"] = "32"
    laptop.environment["PLATEMAKER_LEASE_S"] = "1"
    file = contract(laptop.folder, "a.txt", 70)
    process = laptop.start("run", str(file), "-q", "What?")
    chunks = laptop.folder / "data" / "objects" / "chunks"
    laptop.wait_until(lambda: chunks.is_dir() and len(list(chunks.iterdir())) >= 12, limit_s=60, what="a few chunks")
    process.kill()
    process.wait()
    time.sleep(1.1)

    summary = laptop.json("run", file, "-q", "What?", "--json")

    assert summary["answered"] == 1
    assert summary["tokens_reused"] >= 12 * 32 or summary["snapshots_found"] == 1


@pytest.mark.model
def test_the_quickstart_job_answers_the_whole_checklist(laptop: Installation, real_model: Path) -> None:
    laptop.environment["PLATEMAKER_MODEL"] = str(real_model)
    pages = (SAMPLES / "supply-agreement.txt").read_text().split("\f")
    short = laptop.folder / "short.txt"
    short.write_text("\f".join(pages[:3]))

    done = laptop.command("run", short, "--questions", SAMPLES / "checklist.yaml", "--max-tokens", "16")

    assert done.returncode == 0, done.stderr
    for part in ("14 of 14 answered", "once", "would have been read", "MB in 1", "tokens/s", "First token", "CSV"):
        assert part in done.stdout
