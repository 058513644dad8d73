"""How answers are generated, through the decoder: a random model with a real tokenizer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.decode import Decoder, DecodeRequest, DecodeResult
from kernels.errors import ConstraintRefused
from kernels.kv import PrefixKV
from kernels.model import Asked, LanguageModel, load_model
from kernels.params import GenerationParams
from kernels.prefill import chunk_stops, prefill
from kernels.prompt import Prompter
from kernels.settings import KernelSettings

LENGTH = 10
GREEDY = GenerationParams(max_new_tokens=LENGTH, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"law": {"enum": ["England", "永"]}, "sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["law", "sum"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def prompter(tiny_model: Path) -> Prompter:
    return Prompter(tiny_model, "Answer.")


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LanguageModel:
    return load_model(tiny_model, KernelSettings(model=str(tiny_model), device="cpu", dtype="float32", threads=1))


@pytest.fixture(scope="module")
def document(model: LanguageModel, prompter: Prompter, seed: int) -> PrefixKV:
    ids = prompter.prefix_ids(f"A contract, number {seed}.")
    return prefill(model, ids, stops=chunk_stops(len(ids), 0, 64)).kv


@pytest.fixture
def ask(model: LanguageModel, prompter: Prompter, document: PrefixKV) -> Any:
    def asking(params: list[GenerationParams], max_batch: int = 3) -> list[DecodeResult]:
        requests = [
            DecodeRequest(key, prompter.question_ids(f"What says article {key}?"), each, document)
            for key, each in enumerate(params)
        ]
        decoder = Decoder(model, prompter, max_batch=max_batch)
        return sorted(decoder.run(requests), key=lambda result: result.key)

    return asking


def outcome(result: DecodeResult) -> tuple[Any, ...]:
    return result.text, result.token_ids, result.finish


MIXED = [
    GREEDY,
    replace(GREEDY, temperature=1.2, seed=4, min_p=0.02),
    replace(GREEDY, repetition_penalty=1.6),
    GenerationParams(max_new_tokens=80, json_schema=json.dumps(SCHEMA)),
    GenerationParams(max_new_tokens=80, json_schema=json.dumps(SCHEMA), temperature=1.0, seed=1),
    replace(GREEDY, temperature=0.7, top_p=0.8, top_k=40, repetition_penalty=1.1, seed=9),
    GenerationParams(max_new_tokens=40, choices=("Yes", "No", "größer", "🖋")),
    GenerationParams(max_new_tokens=40, regex="[0-9]{2,4}(€|永)", temperature=2.0),
    GenerationParams(max_new_tokens=LENGTH, min_new_tokens=LENGTH),
]


def test_answers_are_the_same_in_every_batch_whatever_each_asks_for(ask: Any) -> None:
    alone = [outcome(result) for result in ask(MIXED, max_batch=1)]

    for max_batch in (2, 5, len(MIXED)):
        assert [outcome(result) for result in ask(MIXED, max_batch=max_batch)] == alone


def test_constrained_answers_are_complete_and_of_their_form(ask: Any) -> None:
    results = ask(MIXED)

    for at in (3, 4):
        value = json.loads(results[at].text)
        assert value["law"] in ("England", "永") and 0 <= value["sum"] <= 999
    assert results[6].text in MIXED[6].choices
    assert results[7].text[-1] in "€永" and results[7].text[:-1].isascii()
    assert {results[at].finish for at in (3, 4, 6, 7)} == {"stop"}


def test_a_complete_answer_ends_without_another_step(ask: Any, model: LanguageModel, monkeypatch: Any) -> None:
    honest, steps = LanguageModel.ask_all, []
    monkeypatch.setattr(
        LanguageModel, "ask_all", lambda self, *what, **how: (steps.append(1), honest(self, *what, **how))[1]
    )

    (result,) = ask([GenerationParams(choices=("abc",))])

    assert (result.text, len(steps), len(result.token_ids)) == ("abc", 3, 3)


def test_a_constrained_answer_that_is_cut_off_says_so(ask: Any) -> None:
    (result,) = ask([GenerationParams(max_new_tokens=2, choices=("abc",))])

    assert (result.text, result.finish) == ("ab", "length")


def test_a_constrained_answer_keeps_its_blanks(ask: Any) -> None:
    (result,) = ask([GenerationParams(regex=" a \n")])

    assert result.text == " a \n"


def test_a_form_that_cannot_be_enforced_fails_its_question_and_no_other(ask: Any) -> None:
    expected = ask([GREEDY] * 3)

    results = ask([GREEDY, GenerationParams(regex="(?=a)"), GREEDY])

    assert isinstance(results[1].error, ConstraintRefused)
    assert results[1].finish == "error"
    assert [outcome(results[at]) for at in (0, 2)] == [outcome(expected[at]) for at in (0, 2)]


def test_a_stop_token_ends_the_answer_also_where_eos_is_ignored(ask: Any) -> None:
    (whole,) = ask([GREEDY])
    end = whole.token_ids[-1]

    (result,) = ask([replace(GREEDY, stop_token_ids=(end,))])

    assert result.token_ids == whole.token_ids[: whole.token_ids.index(end)]
    assert result.finish == "stop"


def test_logprobs_come_for_each_token_of_the_answer_where_asked_for(ask: Any) -> None:
    plain, chosen, many = ask([GREEDY, replace(GREEDY, logprobs=0), replace(GREEDY, logprobs=4)])

    assert plain.logprobs is None
    for result, count in ((chosen, 0), (many, 4)):
        assert [token.token_id for token in result.logprobs] == list(result.token_ids)
        assert all(len(token.top) == count and token.logprob <= 0 for token in result.logprobs)
    for token in many.logprobs:  # a greedy answer's token is the likeliest
        assert token.top[0] == (token.token_id, token.logprob)
        assert sorted((logprob for _, logprob in token.top), reverse=True) == [logprob for _, logprob in token.top]


def test_the_repetition_penalty_counts_question_and_answer(ask: Any, prompter: Prompter) -> None:
    """So high a penalty that no token of either comes again while another has a positive score."""
    (result,) = ask([replace(GREEDY, repetition_penalty=10.0)])

    assert len(set(result.token_ids)) == LENGTH
    assert not set(result.token_ids) & set(prompter.question_ids("What says article 0?"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_fail_a_constrained_answer_too(
    ask: Any, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LanguageModel, asked: list[Asked], *, every: bool) -> Tensor:
        return torch.full((sum(len(each.pending) for each in asked), 258), bad)

    monkeypatch.setattr(LanguageModel, "ask_all", broken)

    results = ask([GREEDY, MIXED[3]])

    assert [result.finish for result in results] == ["error", "error"]
    assert {str(result.error) for result in results} == {str(results[0].error)}
