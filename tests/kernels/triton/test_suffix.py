from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import Attended, fold
from tests.kernels.triton.cases import DIMS, NO_TRITON, TOLERANCE, attend_exactly, few, moved

pytest.importorskip("triton", reason=NO_TRITON)

from kernels.triton.suffix import plan_tiles, suffix_merge, tile_rows


@dataclass
class Batch:
    """Questions in slots, as `kernels.rows.DecodeRows` has them, with random parts of a document before them."""

    counts: list[int]
    lengths: list[int]
    q: Tensor  # [query_heads, tokens, head_dim]
    k: Tensor
    v: Tensor
    parts: Attended
    window: int
    softcap: float | None
    sinks: Tensor | None

    def expected(self, scale: float) -> Tensor:
        """[tokens, query_heads, v_dim] in float64: one softmax over parts, own keys and sink."""
        heads, group = self.k.shape[1], self.q.shape[0] // self.k.shape[1]
        outs, token = [], 0
        for slot, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            for offset in range(count):
                at = length + offset
                keys = torch.arange(self.k.shape[2])
                visible = (keys <= at) & (keys > at - self.window)
                q = self.q[:, token].view(heads, group, -1)
                own = attend_exactly(q, self.k[slot].nan_to_num(), self.v[slot].nan_to_num(), visible, scale,
                                     self.softcap)  # fmt: skip
                rows = slice(token * group, (token + 1) * group)
                logs = torch.cat([self.parts.lse[:, :, rows].double(), own.lse[None]])
                seen = torch.cat([self.parts.out[:, :, rows].double(), own.out[None]])
                if self.sinks is not None:
                    logs = torch.cat([logs, self.sinks.double().view(1, heads, group)])
                    seen = torch.cat([seen, torch.zeros_like(seen[:1])])
                outs.append((logs.softmax(0)[..., None] * seen).sum(0).flatten(0, 1))
                token += 1
        return torch.stack(outs)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 4, 7, 20]))
    slots = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(1, 9), min_size=slots, max_size=slots))
    lengths = draw(st.lists(st.sampled_from([0, 1, 15, 33, 70]), min_size=slots, max_size=slots))
    head_dim, v_dim = draw(st.sampled_from(DIMS))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens, num_parts = sum(counts), draw(st.integers(1, 5))
    q = torch.randn((heads * group, tokens, head_dim), generator=generator).to(dtype)
    k = torch.randn((slots, heads, 80, head_dim), generator=generator).to(dtype)
    v = torch.randn((slots, heads, 80, v_dim), generator=generator).to(dtype)
    for slot, (count, length) in enumerate(zip(counts, lengths, strict=True)):  # what stood there before
        k[slot, :, count + length :] = float("nan")
        v[slot, :, count + length :] = float("nan")
    out = torch.randn((num_parts, heads, tokens * group, v_dim), generator=generator)
    lse = torch.randn((num_parts, heads, tokens * group), generator=generator) * 3 + 4
    unseen = torch.rand(lse.shape, generator=generator) < 0.2  # by a window, for example
    parts = Attended(out.masked_fill(unseen[..., None], 0.0), lse.masked_fill(unseen, float("-inf")))
    sinks = torch.randn((heads * group,), generator=generator).to(dtype) if draw(st.booleans()) else None
    return Batch(counts, lengths, q, k, v, parts, draw(st.sampled_from([1 << 40, 1, 20])),
                 draw(st.none() | st.just(5.0)), sinks)  # fmt: skip


@given(batch=batches())
@few
def test_own_keys_document_and_sinks_make_one_softmax(batch: Batch, device: torch.device) -> None:
    heads, scale = batch.k.shape[1], batch.q.shape[-1] ** -0.5
    group = batch.q.shape[0] // heads

    found = suffix_merge(
        fold(batch.q, heads).to(device),
        moved(batch.k, device),
        moved(batch.v, device),
        plan_tiles(batch.counts, batch.lengths, group, device),
        Attended(batch.parts.out.to(device), batch.parts.lse.to(device)),
        group=group,
        scale=scale,
        window=batch.window,
        softcap=batch.softcap,
        sinks=None if batch.sinks is None else batch.sinks.to(device),
    )

    assert found.dtype == batch.q.dtype
    tolerance = 2 * TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(found.double().cpu(), batch.expected(scale), atol=tolerance, rtol=tolerance)


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=9), group=st.integers(1, 40))
@few
def test_every_token_is_in_one_tile(counts: list[int], group: int) -> None:
    lengths = [7 * slot for slot in range(len(counts))]

    tiles = plan_tiles(counts, lengths, group, torch.device("cpu")).tolist()

    found = [(slot, token + at, past + at) for slot, token, count, past in tiles for at in range(count)]
    tokens = [(slot, offset) for slot, count in enumerate(counts) for offset in range(count)]
    assert found == [(slot, index, lengths[slot] + offset) for index, (slot, offset) in enumerate(tokens)]
    assert all(count * group <= tile_rows(group) for _, _, count, _ in tiles)
