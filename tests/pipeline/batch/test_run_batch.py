"""Batch files from the command line's function to their output, over a tiny model."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernels.decode import Decoder, DecodeRequest
from kernels.params import GenerationParams
from kernels.prefill import chunk_stops, prefill
from kernels.settings import KernelSettings
from pipeline.batch.answer import Counts
from pipeline.batch.journal import open_journal
from pipeline.batch.questions import write_playbook
from pipeline.batch.run import BatchDone, run_batch
from pipeline.errors import BatchFileError
from pipeline.settings import PipelineSettings
from storage.settings import StorageSettings
from tasks.engine import Engine
from tasks.settings import TaskSettings

SYSTEM = "You review documents."
DOCUMENTS = [f"Contract {name}. 甲方付款🖋. " + f"The Supplier {name} shall deliver. " * 38 for name in "AB"]
QUESTIONS = ["What is delivered?", "When is it paid?", "何时付款？"]


def line(custom_id: str, content: object, **body: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    asked = {"model": "gpt-4o-mini", "messages": messages, "max_tokens": 8, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": asked}


def questions() -> list[dict[str, Any]]:
    """Questions of documents, mixed."""
    return [
        line(f"{number}-{which}", f"{document}\n\n{question}")
        for number, question in enumerate(QUESTIONS)
        for which, document in enumerate(DOCUMENTS)
    ]


@dataclass
class Batch:
    folder: Path
    model: Path

    def write(self, *lines: object) -> Path:
        file = self.folder / "in.jsonl"
        raw = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
        file.write_bytes(b"\n".join(raw) + b"\n")
        return file

    @property
    def settings(self) -> KernelSettings:
        return KernelSettings(model=str(self.model), chunk_tokens=256, max_batch=4)

    def run(self, file: Path, *, errors: bool = False, on_done: Callable[[Counts], None] | None = None) -> BatchDone:
        return run_batch(
            file,
            self.folder / "out.jsonl",
            self.folder / "errors.jsonl" if errors else None,
            storage=StorageSettings(data_dir=self.folder / "data"),
            kernel=self.settings,
            task=TaskSettings(),
            settings=PipelineSettings(),
            max_tokens=8,
            on_indexed=lambda _lines: None,
            on_done=on_done or (lambda _counts: None),
        )

    def out(self, name: str = "out.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text("utf-8").splitlines()]


@pytest.fixture
def batch(tmp_path: Path, tiny_model: Path) -> Batch:
    return Batch(tmp_path, tiny_model)


def in_one_piece(engine: Engine, asked: dict[str, Any]) -> tuple[str, int]:
    """The answer of one whole prompt, and the prompt's tokens."""
    messages = [(message["role"], message["content"]) for message in asked["body"]["messages"]]
    ids = engine.prompter.chat_ids(messages)
    kv = prefill(engine.model, ids[:-1], stops=chunk_stops(len(ids) - 1, 0, 4096)).kv
    decoder = Decoder(engine.model, engine.prompter, max_batch=1)
    (result,) = decoder.run([DecodeRequest(0, ids[-1:], GenerationParams(max_new_tokens=8), kv)])
    return result.text, len(ids)


def test_answers_are_those_of_one_piece_in_the_order_of_the_input(batch: Batch) -> None:
    lines = [*questions(), line("alone", "Short?")]
    done = batch.run(batch.write(*lines))

    found, engine = batch.out(), Engine(batch.settings)
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in lines]
    assert (done.failed, done.counts.groups) == (0, 2)
    for asked, each in zip(lines, found, strict=True):
        body, (text, tokens) = each["response"]["body"], in_one_piece(engine, asked)
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        assert body["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert body["usage"]["prompt_tokens"] == tokens
        assert body["usage"]["total_tokens"] == tokens + body["usage"]["completion_tokens"]
    usage = [each["response"]["body"]["usage"] for each in found]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usage]
    assert sum(count == 0 for count in cached) == 3  # the first of each document, and the one alone
    assert sum(each["prompt_tokens"] for each in usage) - sum(cached) == done.counts.computed_tokens
    assert [path.name for path in batch.folder.glob("*journal*")] == []


def test_a_second_run_finds_the_snapshots(batch: Batch) -> None:
    file = batch.write(*questions())
    batch.run(file)
    first = batch.out()

    done = batch.run(file)

    texts = [each["response"]["body"]["choices"] for each in first]
    assert [each["response"]["body"]["choices"] for each in batch.out()] == texts
    cached = [each["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for each in batch.out()]
    assert min(cached) > 1000
    assert done.counts.computed_tokens == done.counts.prompt_tokens - sum(cached)


class Killed(Exception):
    pass


def test_a_run_that_was_cut_off_goes_on(batch: Batch) -> None:
    file = batch.write(*questions())
    batch.run(file)
    whole = [each["response"]["body"]["choices"] for each in batch.out()]
    (batch.folder / "out.jsonl").unlink()

    def kill(counts: Counts) -> None:
        if counts.answered == 4:
            raise Killed

    with pytest.raises(Killed):
        batch.run(file, on_done=kill)
    journal = batch.folder / "out.jsonl.journal"
    journal.write_bytes(journal.read_bytes()[:-5])  # the last record was being written
    assert not (batch.folder / "out.jsonl").exists()

    done = batch.run(file)

    assert (done.counts.found_done, done.counts.answered) == (3, 3)
    assert [each["response"]["body"]["choices"] for each in batch.out()] == whole


GOOD = line("good", "Who?")
BROKEN: list[tuple[object, str]] = [
    (b"{not json", "not valid JSON"),
    (b"[1]", "not a JSON object"),
    (b'"\xff"', "not valid JSON"),
    ({**GOOD, "custom_id": None}, "no custom_id"),
    (GOOD, "already that of line 1"),
    ({**GOOD, "custom_id": "url", "url": "/v1/embeddings"}, "url must be"),
    ({**GOOD, "custom_id": "method", "method": "GET"}, "method must be POST"),
    ({**GOOD, "custom_id": "body", "body": None}, "no body"),
    (line("n", "Who?", n=2), "n must be 1"),
    (line("tools", "Who?", tools=[{"type": "function"}]), "tools"),
    (line("image", [{"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
    (line("unknown", "Who?", best_of=3), "best_of"),
    (line("hot", "Who?", temperature=3), "temperature"),
    (line("half", "\ud800"), "half a character"),
    (line("schema", "Who?", response_format={"type": "json_schema"}), "json_schema"),
    (line("long", "Who? " * 2000), "tokens"),
    (line("top", "Who?", top_logprobs=2), "logprobs"),
    ({**GOOD, "custom_id": "none", "body": {"model": "m", "messages": []}}, "messages"),
]


def test_each_wrong_line_is_named_and_stops_no_other(batch: Batch) -> None:
    file = batch.write(GOOD, *(each for each, _ in BROKEN))

    done = batch.run(file, errors=True)

    assert [each["custom_id"] for each in batch.out()] == ["good"]
    refused = batch.out("errors.jsonl")
    assert done.failed == len(refused) == len(BROKEN)
    for number, ((_, reason), each) in enumerate(zip(BROKEN, refused, strict=True), 2):
        if each["response"] is None:
            message = each["error"]["message"]
        else:
            assert each["response"]["status_code"] == 400
            message = each["response"]["body"]["error"]["message"]
        assert f"Line {number}" in message
        assert reason in message


def test_windows_line_ends_a_bom_and_blank_lines_are_fine(batch: Batch) -> None:
    file = batch.folder / "in.jsonl"
    lines = [json.dumps(each).encode() for each in (line("a", "Who?"), line("b", "When?"))]
    file.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n" + lines[1] + b"\r\n\r\n")

    assert batch.run(file).lines == 2
    assert [each["custom_id"] for each in batch.out()] == ["a", "b"]


def test_json_and_logprobs_come_in_openais_form(batch: Batch) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = {"response_format": form, "logprobs": True, "top_logprobs": 2, "max_tokens": 32}

    batch.run(batch.write(line("a", "Is it?", **body)))

    (choice,) = batch.out()[0]["response"]["body"]["choices"]
    assert isinstance(json.loads(choice["message"]["content"])["a"], bool)
    assert choice["finish_reason"] == "stop"
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in choice["logprobs"]["content"])


@pytest.mark.parametrize("content", [None, b"", b"\n\r\n"])
def test_a_file_without_lines_is_refused(batch: Batch, content: bytes | None) -> None:
    file = batch.folder / "in.jsonl"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(BatchFileError):
        batch.run(file)


def test_one_output_has_one_writer(tmp_path: Path) -> None:
    with open_journal(tmp_path / "out.jsonl"), pytest.raises(BatchFileError), open_journal(tmp_path / "out.jsonl"):
        pass


def test_questions_are_imported_once_each_without_their_documents(batch: Batch) -> None:
    made = write_playbook(batch.write(*questions(), b"{"), batch.folder / "playbook.yaml")

    written = yaml.safe_load((batch.folder / "playbook.yaml").read_text("utf-8"))
    assert [entry["question"] for entry in written["questions"]] == QUESTIONS
    assert (made.questions, made.groups, made.left_out) == (3, 2, 1)
