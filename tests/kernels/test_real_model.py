"""The small real model in float32 against transformers' own attention, reading document and question at once."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from kernels.decode import Decoder, DecodeRequest, DecodeResult
from kernels.kv import PrefixKV, SuffixKV
from kernels.model import LanguageModel, load_model
from kernels.params import GenerationParams
from kernels.prefill import chunk_stops, prefill
from kernels.prompt import Prompter
from kernels.settings import KernelSettings, user_cache_dir
from kernels.steps import ATTENTION_NAME, DecodeStep

pytestmark = pytest.mark.model

SAMPLES = Path(__file__).resolve().parents[2] / "pipeline" / "samples"
# Read before any test changes the environment.
FOLDER = Path(
    os.environ.get("PLATEMAKER_TEST_MODEL") or user_cache_dir() / "models" / "smollm2-135m-instruct"
).expanduser()
TOLERANCE = 1e-3
EXCERPT = 1200  # characters, about 370 tokens: transformers reads them anew for each question
GENERATED = 4
PARAMS = GenerationParams(max_new_tokens=32)


@dataclass
class Engine:
    model: LanguageModel
    prompter: Prompter


@dataclass
class Document:
    """One document with its questions, our KV of it, and what transformers says."""

    kv: PrefixKV
    questions: list[list[int]]
    first_logits: list[Tensor]
    texts: list[str]


@pytest.fixture(scope="module")
def engine() -> Engine:
    if not (FOLDER / "config.json").exists():
        pytest.skip(f"no model in {FOLDER}; run scripts/get_model, or set PLATEMAKER_TEST_MODEL to its folder")
    settings = KernelSettings(model=str(FOLDER), device="cpu", dtype="float32", threads=1)
    return Engine(load_model(FOLDER, settings), Prompter(FOLDER, settings.system_prompt))


@pytest.fixture(scope="module", params=["beginning", "end"])
def document(engine: Engine, request: pytest.FixtureRequest) -> Document:
    text = (SAMPLES / "supply-agreement.txt").read_text("utf-8")
    checklist = yaml.safe_load((SAMPLES / "checklist.yaml").read_text("utf-8"))["questions"][:12]
    prefix = engine.prompter.prefix_ids(text[:EXCERPT] if request.param == "beginning" else text[-EXCERPT:])
    questions = [engine.prompter.question_ids(entry["question"]) for entry in checklist]
    hf = engine.model.hf
    first_logits, texts = [], []
    hf.set_attn_implementation("sdpa")
    try:
        for number, question in enumerate(questions):
            ids = torch.tensor([prefix + question])
            if number < GENERATED:
                output = hf.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=PARAMS.max_new_tokens,
                    eos_token_id=sorted(engine.prompter.stop_ids),
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
                first_logits.append(output.logits[0][0])
                texts.append(engine.prompter.text(output.sequences[0, ids.shape[1] :].tolist()).strip())
            else:
                with torch.inference_mode():
                    first_logits.append(hf(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1])
    finally:
        hf.set_attn_implementation(ATTENTION_NAME)
    return Document(
        prefill(engine.model, prefix, stops=chunk_stops(len(prefix), 0, 128)).kv, questions, first_logits, texts
    )


def answers(engine: Engine, document: Document, keys: list[int]) -> dict[int, DecodeResult]:
    decoder = Decoder(engine.model, engine.prompter, max_batch=3)
    requests = [DecodeRequest(key, document.questions[key], PARAMS, document.kv) for key in keys]
    return {result.key: result for result in decoder.run(requests)}


def test_the_first_logits_of_every_question_equal_reading_everything_at_once(
    engine: Engine, document: Document
) -> None:
    counts = [len(question) for question in document.questions]
    step = DecodeStep(document.kv, SuffixKV(len(counts), max(counts)), counts, [0] * len(counts), engine.model.device)

    ids = [token for question in document.questions for token in question]
    logits = engine.model.forward(step, ids, torch.tensor(counts).cumsum(0) - 1)

    error = float((logits - torch.stack(document.first_logits)).abs().max())
    print(f"largest error of a logit {error:.1e} over {document.kv.length} tokens")  # noqa: T201 # shown by pytest -rP
    assert error <= TOLERANCE


def test_greedy_answers_equal_transformers_generate_in_either_order(engine: Engine, document: Document) -> None:
    expected = dict(enumerate(document.texts))

    forward = answers(engine, document, [0, 1, 2, 3])
    backward = answers(engine, document, [3, 2, 1, 0])

    assert {key: result.text for key, result in forward.items()} == expected
    assert {key: result.token_ids for key, result in backward.items()} == {
        key: result.token_ids for key, result in forward.items()
    }


CHOICES = ("the Supplier", "the Customer", "both Parties", "not stated", "5 days")
SCHEMA = {
    "type": "object",
    "properties": {"found": {"type": "boolean"}, "words": {"type": "string", "maxLength": 30}},
    "required": ["found", "words"],
    "additionalProperties": False,
}


def test_a_constrained_answer_is_greedy_among_all_tokens_that_its_form_allows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a vocabulary whose tokens overlap in many ways; the allowed ones are found by their texts."""
    tokenizer, logits = engine.prompter.tokenizer, []
    texts = [token.replace("\u0120", " ") for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    honest = LanguageModel.ask_all

    def recording(self: LanguageModel, *what: Any, **how: Any) -> Tensor:
        found = honest(self, *what, **how)
        logits.append(found.clone())
        return found

    prefix = engine.prompter.prefix_ids((SAMPLES / "supply-agreement.txt").read_text("utf-8")[:300])
    kv = prefill(engine.model, prefix, stops=chunk_stops(len(prefix), 0, 128)).kv
    monkeypatch.setattr(LanguageModel, "ask_all", recording)
    question = engine.prompter.question_ids("Who shall give notice?")
    forms = (GenerationParams(choices=CHOICES), GenerationParams(json_schema=json.dumps(SCHEMA)))
    decoder = Decoder(engine.model, engine.prompter, max_batch=2)

    chosen, parsed = sorted(
        decoder.run([DecodeRequest(key, question, form, kv) for key, form in enumerate(forms)]),
        key=lambda result: result.key,
    )

    assert chosen.text in CHOICES
    begun = ""
    for step, token in enumerate(chosen.token_ids):
        left = [choice[len(begun) :] for choice in CHOICES if choice.startswith(begun)]
        allowed = [
            number
            for number, text in enumerate(texts)
            if number not in tokenizer.all_special_ids and any(way.startswith(text) for way in left)
        ]
        assert token in allowed
        # Where the next letter is the same in all of them, the tokenizer's own token is taken.
        assert len({way[0] for way in left}) == 1 or token == allowed[int(logits[step][0, allowed].argmax())]
        begun += texts[token]
    assert begun == chosen.text
    value = json.loads(parsed.text)
    assert isinstance(value["found"], bool) and len(value["words"]) <= 30
    assert (chosen.finish, parsed.finish) == ("stop", "stop")
