"""Random inputs of the kernels, and the same attention in float64."""

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import Attended

NO_TRITON = "Triton is not installed; pip install 'platemaker[test]' brings it"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DIMS = [(32, 32), (48, 48), (64, 64), (80, 80), (128, 128), (64, 48), (48, 128)]

few = settings(
    max_examples=14,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


@dataclass
class Case:
    """Rows over one document: row r sees the keys first[r] <= key < stop[r], where these are given."""

    q: Tensor
    k: Tensor
    v: Tensor
    first: Tensor | None
    stop: Tensor | None
    scale: float
    softcap: float | None

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.q.dtype]

    @property
    def begin(self) -> int:
        return 0 if self.first is None else max(0, min(int(self.first.min()), self.k.shape[1]))

    def on(self, device: torch.device) -> "Case":
        first, stop = (None if at is None else at.to(device, torch.int32) for at in (self.first, self.stop))
        q, k, v = (moved(tensor, device) for tensor in (self.q, self.k, self.v))
        return Case(q, k, v, first, stop, self.scale, self.softcap)

    def expected(self) -> Attended:
        keys = torch.arange(self.k.shape[1])
        first = torch.zeros(self.q.shape[1]) if self.first is None else self.first
        stop = torch.full((self.q.shape[1],), self.k.shape[1]) if self.stop is None else self.stop
        visible = (keys >= first[:, None]) & (keys < stop[:, None])
        return attend_exactly(self.q, self.k, self.v, visible, self.scale, self.softcap)


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Attended:
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    return Attended(torch.nan_to_num(scores.softmax(-1)) @ v.double(), scores.logsumexp(-1))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, as a view of a buffer with room before and behind it."""
    shape = list(tensor.shape)
    shape[-2] += 7
    buffer = torch.full(shape, float("nan"), dtype=tensor.dtype, device=device)
    view = buffer[..., 3:-4, :]
    view.copy_(tensor)
    return view


@st.composite
def cases(draw: st.DrawFn, max_keys: int = 300) -> Case:
    heads, group, tokens = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 4])), draw(st.integers(1, 12))
    keys = draw(st.integers(1, max_keys))
    head_dim, v_dim = draw(st.sampled_from(DIMS))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = tokens * group
    q = torch.randn((heads, rows, head_dim), generator=generator).to(dtype)
    k = torch.randn((heads, keys, head_dim), generator=generator).to(dtype)
    v = torch.randn((heads, keys, v_dim), generator=generator).to(dtype)
    kind = draw(st.sampled_from(["all", "window", "causal", "any"]))
    first = stop = None
    window = draw(st.integers(1, keys + 10))
    if kind == "window":  # tokens behind the document; far ones see nothing of it
        first = keys + torch.randint(0, keys + 1, (tokens,), generator=generator).repeat_interleave(group) - window + 1
    elif kind == "causal":
        stop = (keys - tokens + torch.arange(tokens) + 1).clamp(min=0).repeat_interleave(group)
        first = stop - window
    elif kind == "any":
        first = torch.randint(-5, keys + 1, (rows,), generator=generator)
        stop = torch.randint(0, keys + 1, (rows,), generator=generator)
    softcap = draw(st.none() | st.floats(0.5, 50))
    return Case(q, k, v, first, stop, head_dim**-0.5 * draw(st.sampled_from([0.5, 1.5])), softcap)


def assert_close(actual: Attended, expected: Attended, tolerance: float) -> None:
    torch.testing.assert_close(actual.out.double().cpu(), expected.out, atol=tolerance, rtol=0)
    torch.testing.assert_close(actual.lse.double().cpu(), expected.lse, atol=tolerance, rtol=tolerance)
