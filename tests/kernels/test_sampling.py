import torch

from kernels.params import GenerationParams
from kernels.sampling import Sampler

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, float("-inf"), 2.5])
DRAWS = 3000


def frequencies(params: GenerationParams) -> list[float]:
    sampler = Sampler(params, [1, 2, 3])
    drawn = torch.tensor([sampler.draw(LOGITS) for _ in range(DRAWS)])
    shares: list[float] = (torch.bincount(drawn, minlength=len(LOGITS)) / DRAWS).tolist()
    return shares


def assert_near(actual: list[float], expected: torch.Tensor) -> None:
    for share, probability in zip(actual, expected.tolist(), strict=True):
        # Five standard deviations; exactly 0 where the probability is 0.
        assert abs(share - probability) <= 5 * (probability * (1 - probability) / DRAWS) ** 0.5


def test_draws_follow_the_softmax_at_their_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        actual = frequencies(GenerationParams(temperature=temperature))
        assert_near(actual, (LOGITS.double() / temperature).softmax(-1))


def test_top_k_leaves_the_best_k() -> None:
    kept = torch.tensor([False, True, False, True, False, True])
    expected = LOGITS.double().masked_fill(~kept, float("-inf")).softmax(-1)

    assert_near(frequencies(GenerationParams(temperature=1.0, top_k=3)), expected)


def test_top_p_leaves_the_fewest_that_reach_p() -> None:
    # Probabilities 0.46, 0.28, 0.17, 0.06, ...: 0.46 + 0.28 reach 0.7.
    kept = torch.tensor([False, True, False, False, False, True])
    expected = LOGITS.double().masked_fill(~kept, float("-inf")).softmax(-1)

    assert_near(frequencies(GenerationParams(temperature=1.0, top_p=0.7)), expected)


def test_the_draws_depend_on_seed_and_question_alone() -> None:
    flat = torch.zeros(1000)

    def draws(seed: int, question: list[int]) -> list[int]:
        sampler = Sampler(GenerationParams(temperature=1.0, seed=seed), question)
        return [sampler.draw(flat) for _ in range(5)]

    first = draws(1, [4, 5])
    torch.manual_seed(99)
    assert draws(1, [4, 5]) == first
    assert draws(2, [4, 5]) != first
    assert draws(1, [5, 4]) != first
