import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.errors import NonFiniteLogits
from kernels.params import GenerationParams
from kernels.sampling import Drawn, Sampler, draw, penalise, warp

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, -1e9, 2.5])
DRAWS = 3000
VOCAB = 2500  # more than top_p looks at first


def draw_token(sampler: Sampler, logits: Tensor) -> int:
    (drawn,) = draw(logits.clone()[None], [sampler])
    assert isinstance(drawn, Drawn)
    return drawn.token


def frequencies(params: GenerationParams) -> list[float]:
    sampler = Sampler(params, [1, 2, 3])
    drawn = torch.tensor([draw_token(sampler, LOGITS) for _ in range(DRAWS)])
    shares: list[float] = (torch.bincount(drawn, minlength=len(LOGITS)) / DRAWS).tolist()
    return shares


def assert_near(actual: list[float], expected: torch.Tensor) -> None:
    for share, probability in zip(actual, expected.tolist(), strict=True):
        # Five standard deviations, of draws whose seed is fixed; exactly 0 where the probability is 0.
        assert abs(share - probability) <= 5 * (probability * (1 - probability) / DRAWS) ** 0.5


def test_draws_follow_the_softmax_at_their_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        actual = frequencies(GenerationParams(temperature=temperature))
        assert_near(actual, (LOGITS.double() / temperature).softmax(-1))


@pytest.mark.parametrize("how", [{"top_k": 3}, {"min_p": 0.3}], ids=str)
def test_draws_leave_out_what_is_cut_off(how: dict[str, float]) -> None:
    kept = torch.tensor([False, True, False, True, False, True])
    expected = LOGITS.double().masked_fill(~kept, float("-inf")).softmax(-1)

    assert_near(frequencies(GenerationParams(temperature=1.0, **how)), expected)  # type: ignore[arg-type]


def test_top_p_leaves_the_fewest_that_reach_p() -> None:
    # Probabilities 0.46, 0.28, 0.17, 0.06, ...: 0.46 + 0.28 reach 0.7.
    kept = torch.tensor([False, True, False, False, False, True])
    expected = LOGITS.double().masked_fill(~kept, float("-inf")).softmax(-1)

    assert_near(frequencies(GenerationParams(temperature=1.0, top_p=0.7)), expected)


def test_the_draws_depend_on_seed_and_question_alone() -> None:
    flat = torch.zeros(1000)

    def draws(seed: int, question: list[int]) -> list[int]:
        sampler = Sampler(GenerationParams(temperature=1.0, seed=seed), question)
        return [draw_token(sampler, flat) for _ in range(5)]

    first = draws(1, [4, 5])
    torch.manual_seed(99)
    assert draws(1, [4, 5]) == first
    assert draws(2, [4, 5]) != first
    assert draws(1, [5, 4]) != first


WARPED = [
    {},
    {"top_k": 7},
    {"top_p": 0.4},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.1},
    {"top_k": VOCAB + 1, "top_p": 1.0, "min_p": 1.0},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("how", WARPED, ids=str)
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_distributions_are_those_of_transformers(
    how: dict[str, float], spread: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    logits = spread * torch.randn(VOCAB, generator=generator, dtype=dtype)
    params = GenerationParams(temperature=0.3 + 2 * float(torch.rand(1, generator=generator)), **how)  # type: ignore[arg-type]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))

    ours, theirs = warp(logits, params), warpers(torch.tensor([[0]]), logits[None])[0]

    # A sum may be rounded to the other side of top_p, a quotient to that of min_p; of equals transformers keeps some.
    rounding = 2 * VOCAB * torch.finfo(dtype).eps
    scores = (logits / params.temperature).double()
    cut = warp(scores, GenerationParams(temperature=1.0, top_k=params.top_k))
    probs = cut.softmax(-1)
    differing = ours.isfinite() ^ theirs.isfinite()
    for token in differing.nonzero().flatten().tolist():
        before = float(probs[cut > cut[token]].sum())
        before_or_equal = float(probs[cut >= cut[token]].sum() - probs[token])
        relative = float(probs[token] / probs.max())
        at_top_p = before - rounding < params.top_p < before_or_equal + rounding
        assert at_top_p or abs(relative - params.min_p) < rounding
    same = ~differing
    assert torch.equal(ours[same], theirs[same])


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_is_that_of_transformers_without_the_document(
    penalty: float, generator: torch.Generator
) -> None:
    document, question, answer = (
        torch.randint(0, VOCAB, (count,), generator=generator).tolist() for count in (50, 9, 6)
    )
    logits = torch.randn(VOCAB, generator=generator)
    processor = RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=len(document))
    expected = processor(torch.tensor([document + question + answer]), logits[None].clone())[0]
    sampler = Sampler(GenerationParams(repetition_penalty=penalty), question)
    for token in answer:
        sampler.accept(token)

    sampler.adjust(logits)

    assert torch.equal(logits, expected)


def test_the_ends_of_an_answer_wait_for_the_minimum_as_in_transformers(generator: torch.Generator) -> None:
    prompt, ends = [1, 2, 3], [5, 70, VOCAB - 1]
    params = GenerationParams(min_new_tokens=3, stop_token_ids=(5, VOCAB + 7))
    sampler = Sampler(params, prompt, stop_ids=frozenset(ends[1:]))
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 3, ends)
    answer: list[int] = []
    for _ in range(5):
        logits = torch.randn(VOCAB, generator=generator)
        expected = processor(torch.tensor([prompt + answer]), logits[None].clone())[0]

        sampler.adjust(logits)

        assert torch.equal(logits, expected)
        sampler.accept(8)
        answer.append(8)


def test_ignoring_eos_leaves_only_the_callers_ends() -> None:
    ignoring = Sampler(GenerationParams(ignore_eos=True, stop_token_ids=(5,)), [1], stop_ids=frozenset([2]))
    heeding = Sampler(GenerationParams(stop_token_ids=(5,)), [1], stop_ids=frozenset([2]))

    assert (ignoring.ending, heeding.ending) == ({5}, {2, 5})


ALL_KINDS: list[Callable[[int], GenerationParams]] = [
    lambda seed: GenerationParams(),
    lambda seed: GenerationParams(temperature=1.0, seed=seed),
    lambda seed: GenerationParams(temperature=1.5, seed=seed, min_p=0.01, repetition_penalty=1.2),
    lambda seed: GenerationParams(repetition_penalty=3.0, logprobs=3),
    lambda seed: GenerationParams(temperature=0.8, seed=seed, top_p=0.7, top_k=50, logprobs=0),
    lambda seed: GenerationParams(min_new_tokens=30, stop_token_ids=(3, 4)),
]


def test_what_is_drawn_does_not_depend_on_the_other_rows(generator: torch.Generator) -> None:
    def samplers() -> list[Sampler]:
        return [Sampler(make(row), [row, row + 1]) for row, make in enumerate(ALL_KINDS * 2)]

    together, apart = samplers(), samplers()
    for _ in range(6):
        logits = 3 * torch.randn(len(apart), VOCAB, generator=generator)

        expected = [draw(logits[row : row + 1].clone(), [apart[row]])[0] for row in range(len(apart))]

        assert draw(logits.clone(), together) == expected


def test_a_row_that_is_not_finite_has_no_token_and_the_others_do(generator: torch.Generator) -> None:
    logits = torch.randn(6, VOCAB, generator=generator)
    expected = logits.argmax(-1).tolist()
    for row, bad in ((1, "nan"), (3, "inf"), (4, "-inf")):
        logits[row, 7] = float(bad)

    drawn = draw(logits, [Sampler(GenerationParams(), [1]) for _ in range(6)])

    assert [isinstance(each, NonFiniteLogits) for each in drawn] == [False, True, False, True, True, False]
    assert [each.token for each in drawn if isinstance(each, Drawn)] == [expected[row] for row in (0, 2, 5)]


def test_scores_whose_sum_is_too_large_for_a_float_are_finite() -> None:
    (drawn,) = draw(torch.full((1, 100), 3e38), [Sampler(GenerationParams(), [1])])

    assert isinstance(drawn, Drawn)


def test_logprobs_are_the_models_own_whatever_was_done_to_them(generator: torch.Generator) -> None:
    logits = 3 * torch.randn(1, VOCAB, generator=generator)
    expected = logits[0].double().log_softmax(-1)
    question = logits[0].topk(3).indices.tolist()
    params = GenerationParams(temperature=2.0, repetition_penalty=1.5, top_k=500, logprobs=5)

    (drawn,) = draw(logits, [Sampler(params, question)])

    assert isinstance(drawn, Drawn) and drawn.logprobs is not None
    assert drawn.logprobs.token_id == drawn.token
    assert math.isclose(drawn.logprobs.logprob, float(expected[drawn.token]), abs_tol=1e-4)
    assert [token for token, _ in drawn.logprobs.top] == expected.topk(5).indices.tolist()
    for token, logprob in drawn.logprobs.top:
        assert math.isclose(logprob, float(expected[token]), abs_tol=1e-4)


def test_the_likeliest_among_equals_survive_every_cut() -> None:
    flat = torch.zeros(50)

    for how in ({"top_k": 3}, {"top_p": 0.1}, {"min_p": 1.0}):
        assert warp(flat, GenerationParams(temperature=1.0, **how)).isfinite().all()  # type: ignore[arg-type]


def test_a_penalty_of_tokens_seen_twice_is_given_once() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])

    penalise(logits, [0, 1], 2.0)

    assert logits.tolist() == [1.0, -4.0, 1.0]
