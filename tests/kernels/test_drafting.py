"""Guesses from the document: found where they stand, and never part of an answer unless the model chose them."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.decode import Decoder, DecodeRequest
from kernels.drafting import LONGEST_MATCH, SHORTEST_MATCH, Drafting, Lookup, StepTimes
from kernels.kv import PrefixKV
from kernels.model import Asked, LanguageModel
from kernels.params import GenerationParams
from kernels.prefill import chunk_stops, prefill
from tests.kernels.test_decode import FakePrompter, random_ids

LENGTH = 24


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=8), st.integers(0, 5))
@settings(max_examples=200, deadline=None, database=None)
def test_a_guess_is_what_follows_the_longest_match(document: list[int], tail: list[int], most: int) -> None:
    def expected() -> list[int]:
        for length in range(min(LONGEST_MATCH, len(tail)), SHORTEST_MATCH - 1, -1):
            for at in range(len(document) - length):
                if document[at : at + length] == tail[-length:]:
                    return document[at + length : at + length + most]
        return []

    assert Lookup(document).guess(tail, most) == expected()


def test_guesses_pay_where_a_step_costs_much_by_itself() -> None:
    times = StepTimes()
    assert Drafting(times).pays(1)
    assert not Drafting(times).pays(20)  # nothing is known yet
    for tokens in (1, 5, 30):
        times.note(tokens, 0.060 + 0.004 * tokens)
    drafting = Drafting(times)
    assert drafting.pays(10)  # half of the guesses right; 0.04 of 0.1 s are needed
    assert not drafting.pays(30)

    for _ in range(200):
        drafting.note(8, 0)
    assert not drafting.pays(1)

    for _ in range(200):
        drafting.note(8, 7)
    assert drafting.pays(30)


@pytest.fixture(scope="module")
def document(tiny_llama: LanguageModel, seed: int) -> tuple[list[int], PrefixKV]:
    ids = random_ids(60, torch.Generator().manual_seed(seed))
    return ids, prefill(tiny_llama, ids, stops=chunk_stops(60, 0, 32)).kv


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 1.5, "seed": 3}, {"repetition_penalty": 1.3}, {"min_new_tokens": 3, "logprobs": 2}],
    ids=["greedy", "sampled", "penalty", "logprobs"],
)
@pytest.mark.parametrize("max_batch", [1, 4])
def test_answers_are_the_same_with_guesses_and_take_fewer_steps(
    tiny_llama: LanguageModel,
    document: tuple[list[int], PrefixKV],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, Any],
    max_batch: int,
) -> None:
    ids, kv = document
    questions = [random_ids(count, generator) for count in (3, 7, 1, 9, 5)]
    lengths = [LENGTH, 3, LENGTH - 1, 11, LENGTH]
    steps = 0
    ask_all = tiny_llama.ask_all

    def counted(documents: Iterable[Asked], *, every: bool = False) -> Tensor:
        nonlocal steps
        steps += 1
        return ask_all(documents, every=every)

    monkeypatch.setattr(tiny_llama, "ask_all", counted)
    monkeypatch.setattr(Drafting, "pays", lambda _self, _questions: True)

    def answers(lookups: list[Lookup | None]) -> tuple[dict[int, Any], int]:
        nonlocal steps
        steps = 0
        requests = [
            DecodeRequest(
                key, question, GenerationParams(max_new_tokens=length, ignore_eos=True, **how), kv, lookups[key]
            )
            for key, (question, length) in enumerate(zip(questions, lengths, strict=True))
        ]
        decoder = Decoder(tiny_llama, FakePrompter(), max_batch=max_batch)  # type: ignore[arg-type]
        results = {result.key: result for result in decoder.run(requests)}
        return {key: results[key].token_ids for key in range(len(questions))}, steps

    plain, plain_steps = answers([None] * 5)
    quoting = [Lookup([*ids, *plain[key]]) for key in range(5)]  # as if each answer stood in the document
    misleading = [Lookup([token for pair in zip(plain[key], ids, strict=False) for token in pair]) for key in range(5)]

    assert answers([Lookup(ids)] * 5)[0] == plain
    assert answers(list(misleading))[0] == plain
    quoted, quoted_steps = answers(list(quoting))
    assert quoted == plain
    assert quoted_steps < plain_steps
