"""Attention of prefill and decode on random shapes, in every type, against float64."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernels.attention import fold, unfold
from kernels.backend import AttentionBackend
from kernels.rows import DecodeRows, PrefillRows
from kernels.steps import EVERYTHING
from kernels.torch_backend import TorchBackend
from tests.kernels.exact import naive, rounding_bound

CPU = torch.device("cpu")
ROOM = 70  # tokens of a slot

few = settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,
    ],
)


@pytest.fixture(params=["torch", "native"])
def chosen(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "torch":
        return TorchBackend()
    found: AttentionBackend = request.getfixturevalue("native")
    return found


@dataclass
class Shape:
    """`counts[i]` new tokens of question i behind `lengths[i]` of its own; 0 is an empty suffix."""

    dtype: torch.dtype
    kv_heads: int
    group: int
    dims: tuple[int, int]
    prefix: int
    counts: list[int]
    lengths: list[int]
    window: int
    softcap: float | None
    seed: int

    @property
    def how(self) -> dict[str, Any]:
        return {"scale": self.dims[0] ** -0.5, "window": self.window, "softcap": self.softcap}

    def tensors(self, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    slots = draw(st.integers(1, 4))
    prefix = draw(st.integers(1, 80) | st.integers(1, 5000) | st.sampled_from([1, 255, 256, 257, 4096, 5000]))
    return Shape(
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        dims=draw(st.sampled_from([(64, 64), (40, 40), (16, 16), (128, 64), (24, 33)])),
        prefix=prefix,
        counts=draw(st.lists(st.integers(1, 6), min_size=slots, max_size=slots)),
        lengths=draw(st.lists(st.just(0) | st.integers(0, 60), min_size=slots, max_size=slots)),
        window=draw(st.just(EVERYTHING) | st.integers(1, prefix + 60)),
        softcap=draw(st.none() | st.floats(1, 50)),
        seed=draw(st.integers(0, 2**31)),
    )


@given(shape=shapes())
@few
def test_questions_see_the_document_and_their_own_tokens(chosen: AttentionBackend, shape: Shape) -> None:
    assume(chosen.name != "native" or shape.dtype != torch.float16)  # which it leaves to torch
    heads, (dim, v_dim), slots = shape.kv_heads, shape.dims, len(shape.counts)
    rows = DecodeRows(shape.counts, shape.lengths, CPU)
    q, k, v, own_k, own_v = shape.tensors(
        (heads * shape.group, sum(shape.counts), dim),
        (heads, shape.prefix, dim),
        (heads, shape.prefix, v_dim),
        (slots, heads, ROOM, dim),
        (slots, heads, ROOM, v_dim),
    )

    shared = chosen.shared(rows, fold(q, heads), k, v, **shape.how)
    found = chosen.own_and_merge(rows, fold(q, heads), own_k, own_v, shared, **shape.how)

    assert found.dtype == shape.dtype
    for slot in range(slots):
        tokens = [token for token, owner in enumerate(rows.slots) if owner == slot]
        keys, values = torch.cat([k, own_k[slot]], 1), torch.cat([v, own_v[slot]], 1)
        at, key = (shape.prefix + rows.local[tokens])[:, None], torch.arange(shape.prefix + ROOM)
        seen = (key <= at) & (key > at - shape.window)
        expected, _ = naive(q[:, tokens], keys, values, seen, scale=dim**-0.5, softcap=shape.softcap)
        bound = rounding_bound(q[:, tokens], keys, values, scale=dim**-0.5)
        torch.testing.assert_close(found[tokens].double(), expected, atol=bound, rtol=0)


@given(shape=shapes(), share=st.floats(0, 1))
@few
def test_a_documents_last_tokens_see_it_up_to_themselves(chosen: AttentionBackend, shape: Shape, share: float) -> None:
    assume(chosen.name != "native" or shape.dtype != torch.float16)
    heads, (dim, v_dim) = shape.kv_heads, shape.dims
    tokens = max(1, min(shape.prefix, int(share * 64)))
    q, k, v = shape.tensors(
        (heads * shape.group, tokens, dim), (heads, shape.prefix, dim), (heads, shape.prefix, v_dim)
    )
    at, key = torch.arange(shape.prefix - tokens, shape.prefix)[:, None], torch.arange(shape.prefix)

    found = chosen.prefill(PrefillRows(tokens, CPU), q, k, v, **shape.how)

    seen = (key <= at) & (key > at - shape.window)
    expected, lse = naive(q, k, v, seen, scale=dim**-0.5, softcap=shape.softcap)
    bound = rounding_bound(q, k, v, scale=dim**-0.5)
    torch.testing.assert_close(unfold(found.out, tokens).double(), expected, atol=bound, rtol=0)
    torch.testing.assert_close(found.lse.double(), fold(lse[..., None], heads)[..., 0], atol=bound, rtol=1e-6)
