from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import attention
from kernels.attention import Attended, attend, fold, merge, plan_blocks, unfold

CPU = torch.device("cpu")
# Largest error of any number. In bfloat16 the scores and the weights are rounded to 8 bits before they are used.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 6e-2}

few = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass
class Case:
    """Row r of head h sees the keys first[h, r] <= key < stop[h, r]."""

    q: Tensor
    k: Tensor
    v: Tensor
    first: Tensor
    stop: Tensor
    scale: float
    softcap: float | None

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.q.dtype]

    def attended(self, start: int = 0, end: int | None = None) -> Attended:
        """Our attention over the keys [start, end) alone."""
        end = self.k.shape[1] if end is None else end
        blocks = plan_blocks(self.first - start, (self.stop - start).clamp(max=end - start), device=CPU)
        k, v = self.k[:, start:end], self.v[:, start:end]
        return attend(self.q, k, v, blocks, scale=self.scale, softcap=self.softcap)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCE), max_keys: int = 1500) -> Case:
    heads, group, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 30))
    keys = draw(st.integers(1, max_keys))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    head_dim, v_dim = draw(st.sampled_from([(8, 8), (16, 4), (8, 24)]))
    dtype = draw(st.sampled_from(dtypes))
    rows = tokens * group
    q = torch.randn((heads, rows, head_dim), generator=generator).to(dtype)
    k = torch.randn((heads, keys, head_dim), generator=generator).to(dtype)
    v = torch.randn((heads, keys, v_dim), generator=generator).to(dtype)
    kind = draw(st.sampled_from(["causal", "prefix", "any"]))
    window = draw(st.none() | st.integers(1, keys + 10)) or 1 << 40
    if kind == "causal":  # the last tokens of a document, as in prefill
        position = torch.arange(max(0, keys - tokens), max(0, keys - tokens) + tokens).repeat_interleave(group)
        first, stop = position - window + 1, (position + 1).clamp(max=keys)
    elif kind == "prefix":  # tokens behind the document, as in decode; far ones see nothing through the window
        position = torch.randint(keys, 2 * keys + 1, (rows,), generator=generator)
        first, stop = position - window + 1, torch.full((rows,), keys)
    else:  # any two bounds for each head and row; where first >= stop the row sees nothing
        first = torch.randint(-5, keys + 1, (heads, rows), generator=generator)
        stop = torch.randint(0, keys + 1, (heads, rows), generator=generator)
    softcap = draw(st.none() | st.floats(0.5, 50))
    scale = head_dim**-0.5 * draw(st.sampled_from([0.5, 1.0, 1.5]))
    return Case(q, k, v, first, stop, scale, softcap)


def reference(case: Case) -> Attended:
    q, k, v = case.q.double(), case.k.double(), case.v.double()
    scores = q @ k.transpose(1, 2) * case.scale
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    keys = torch.arange(k.shape[1])
    visible = (keys >= case.first[..., None]) & (keys < case.stop[..., None])
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.nan_to_num(scores.softmax(-1))
    return Attended(weights @ v, scores.logsumexp(-1))


def assert_close(actual: Attended, expected: Attended, tolerance: float) -> None:
    torch.testing.assert_close(actual.out.double(), expected.out.double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(actual.lse.double(), expected.lse.double(), atol=tolerance, rtol=0)


@given(case=cases())
@few
def test_attention_equals_a_float64_softmax(case: Case) -> None:
    assert_close(case.attended(), reference(case), case.tolerance)


@given(case=cases(max_keys=120), rows=st.integers(1, 20), scores=st.integers(1, 600))
@few
def test_the_size_of_the_blocks_changes_nothing(case: Case, rows: int, scores: int) -> None:
    with mock.patch.multiple(attention, ROW_BLOCK=rows, SCORES_PER_BLOCK=max(rows, scores)):
        assert_close(case.attended(), reference(case), case.tolerance)


@given(case=cases(), cut=st.floats(0, 1))
@few
def test_parts_of_the_keys_merge_to_the_whole(case: Case, cut: float) -> None:
    place = round(cut * case.k.shape[1])

    merged = merge(case.attended(0, place), case.attended(place))

    assert_close(merged, reference(case), case.tolerance)


@given(case=cases(dtypes=(torch.float64,), max_keys=60), first=st.floats(0, 1), second=st.floats(0, 1))
@few
def test_merging_knows_no_order(case: Case, first: float, second: float) -> None:
    places = sorted(round(cut * case.k.shape[1]) for cut in (first, second))
    a, b, c = case.attended(0, places[0]), case.attended(*places), case.attended(places[1])

    assert_close(merge(merge(a, b), c), merge(c, merge(b, a)), case.tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_that_sees_no_key_is_zero_and_leaves_the_merge_to_the_other_part(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    q, k, v = (torch.randn((2, 3, 8), generator=generator).to(dtype) for _ in range(3))
    nothing = attend(q, k, v, plan_blocks(torch.full((3,), 3), torch.full((3,), 3), device=CPU), scale=1.0)
    # Row 1 sees nothing inside a block that others do see.
    some = attend(q, k, v, plan_blocks(torch.tensor([0, 2, 0]), torch.tensor([3, 1, 3]), device=CPU), scale=1.0)

    assert nothing.out.eq(0).all() and nothing.lse.eq(float("-inf")).all()
    assert some.out[:, 1].eq(0).all() and some.lse[:, 1].eq(float("-inf")).all()
    for whole in (merge(some, nothing), merge(nothing, some)):
        assert torch.equal(whole.out, some.out) and torch.equal(whole.lse, some.lse)


def test_scores_beyond_the_range_of_exp_do_not_overflow(generator: torch.Generator) -> None:
    case = Case(
        *(torch.randn((1, 40, 8), generator=generator) * 40 for _ in range(2)),
        torch.randn((1, 40, 8), generator=generator),
        torch.zeros(40, dtype=torch.int64),
        torch.arange(40) + 1,
        1.0,
        None,
    )

    out, lse = case.attended()

    assert lse.max() > 1000
    torch.testing.assert_close(out.double(), reference(case).out, atol=1e-3, rtol=0)


def test_more_rows_than_one_block_are_cut(generator: torch.Generator) -> None:
    rows = 2 * attention.ROW_BLOCK + 17
    position = torch.arange(rows)
    q, k, v = (torch.randn((1, rows, 8), generator=generator) for _ in range(3))
    case = Case(q, k, v, position - 99, position + 1, 0.35, None)

    assert_close(case.attended(), reference(case), case.tolerance)


@given(case=cases(dtypes=(torch.float32,), max_keys=120), rows=st.integers(1, 20), scores=st.integers(1, 600))
@few
def test_blocks_hold_every_visible_pair_once_and_no_block_is_invisible(case: Case, rows: int, scores: int) -> None:
    keys = torch.arange(case.k.shape[1])
    visible = ((keys >= case.first[..., None]) & (keys < case.stop[..., None])).expand(case.q.shape[0], -1, -1)
    seen = torch.zeros(visible.shape, dtype=torch.int64)

    with mock.patch.multiple(attention, ROW_BLOCK=rows, SCORES_PER_BLOCK=max(rows, scores)):
        blocks = plan_blocks(case.first, case.stop, device=CPU)

    for block in blocks:
        part = visible[:, block.rows, block.keys]
        assert part.any()
        assert part.shape[1] * part.shape[2] <= max(rows, scores)
        shown = torch.ones(part.shape, dtype=torch.bool) if block.hidden is None else (~block.hidden).expand(part.shape)
        seen[:, block.rows, block.keys] += shown
    assert torch.equal(seen, visible.long())


@given(kv_heads=st.integers(1, 4), group=st.integers(1, 4), tokens=st.integers(1, 9), seed=st.integers(0, 2**31))
@few
def test_a_fold_row_is_one_head_of_one_token_and_unfold_undoes_it(
    kv_heads: int, group: int, tokens: int, seed: int
) -> None:
    q = torch.randn((kv_heads * group, tokens, 4), generator=torch.Generator().manual_seed(seed))

    folded = fold(q, kv_heads)

    assert folded.shape == (kv_heads, tokens * group, 4)
    for head in range(kv_heads):
        for row in range(tokens * group):
            assert torch.equal(folded[head, row], q[head * group + row % group, row // group])
    assert torch.equal(unfold(folded, tokens), q.transpose(0, 1))
