"""The best token of each row of scores, against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.native.backend import NativeBackend
from kernels.native.library import BestCall, Library, pointer
from kernels.sampling import Look, look_at
from tests.kernels.conftest import SEED

INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def library(native: NativeBackend) -> Library:
    return native.library


def look(library: Library, scores: Tensor) -> Look:
    rows, size = scores.shape
    best, finite = torch.full((rows,), -1), torch.empty(rows, dtype=torch.bool)
    call = BestCall(scores=pointer(scores), best=pointer(best), finite=pointer(finite), rows=rows, size=size)
    call.row = scores.stride(0)
    library.best(call)
    return Look(finite.tolist(), best.tolist())


@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 70) | st.sampled_from([1023, 1024, 1025, 1040, 5000]),
    levels=st.sampled_from([2, 50, 1 << 20]),
    gap=st.integers(0, 3),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=100, deadline=None, database=None)
def test_the_first_of_the_best(library: Library, rows: int, size: int, levels: int, gap: int, seed: int) -> None:
    """`levels`: few of them make ties."""
    generator = torch.Generator().manual_seed(SEED + seed)
    scores = (torch.randint(levels, (rows, size + gap), generator=generator).float() - levels / 2)[:, :size]
    finite, best = look(library, scores)
    assert all(finite) and best == np.argmax(scores.numpy(), -1).tolist()


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 1, 1023, 1024, 2050])
def test_what_is_no_number_is_seen(library: Library, odd: float, at: int) -> None:
    scores = torch.randn(3, 2051)
    scores[1, at] = odd
    finite, best = look(library, scores)
    assert finite == [True, False, True]
    assert [best[0], best[2]] == np.argmax(scores[::2].numpy(), -1).tolist()


def test_large_numbers_are_numbers(library: Library) -> None:
    """Though their sum is not."""
    scores = torch.full((1, 100), 3e38)
    assert look(library, scores) == ([True], [0]) == look_at(scores)
