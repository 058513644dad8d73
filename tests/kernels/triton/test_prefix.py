import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.triton.cases import NO_TRITON, TOLERANCE, Case, assert_close, cases, few

pytest.importorskip("triton", reason=NO_TRITON)

from kernels.triton.launch import Blocks, pick_blocks, split_keys
from kernels.triton.prefix import merged, prefix_parts, shared_prefix

SMALL = Blocks(rows=16, keys=32, num_warps=4, num_stages=2, waves=1)


@given(case=cases())
@few
def test_attention_over_the_document_equals_a_float64_softmax(case: Case, device: torch.device) -> None:
    here = case.on(device)

    found = shared_prefix(
        here.q, here.k, here.v, scale=here.scale, softcap=here.softcap, first=here.first, stop=here.stop,
        begin=case.begin,
    )  # fmt: skip

    assert_close(found, case.expected(), case.tolerance)


@given(case=cases(max_keys=900), waves=st.integers(1, 20))
@few
def test_the_number_of_parts_changes_nothing(case: Case, device: torch.device, waves: int) -> None:
    here = case.on(device)

    parts = prefix_parts(
        here.q, here.k, here.v, scale=here.scale, softcap=here.softcap, first=here.first, stop=here.stop,
        blocks=SMALL._replace(waves=waves),
    )  # fmt: skip

    assert_close(merged(parts), case.expected(), case.tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_beyond_the_range_of_exp_do_not_overflow(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    q, k = (torch.randn((1, 20, 32), generator=generator).to(dtype) * 40 for _ in range(2))
    v = torch.randn((1, 20, 32), generator=generator).to(dtype)
    case = Case(q, k, v, None, None, 1.0, None)

    found = shared_prefix(*(tensor.to(device) for tensor in (q, k, v)), scale=1.0)

    assert found.lse.max() > 1000
    assert_close(found, case.expected(), 2 * case.tolerance)


@given(rows=st.integers(1, 5000), dim=st.integers(32, 256), keys=st.integers(0, 200_000), heads=st.integers(1, 32))
@few
def test_parts_cover_the_document_and_none_is_empty(rows: int, dim: int, keys: int, heads: int) -> None:
    for dtype in TOLERANCE:
        blocks = pick_blocks(rows, dim, dim, dtype)
        split = split_keys(keys, heads, blocks, torch.device("cpu"))

        assert split.keys % blocks.keys == 0
        assert split.parts * split.keys >= keys
        assert keys == 0 or (split.parts - 1) * split.keys < keys
