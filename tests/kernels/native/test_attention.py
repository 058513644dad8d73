"""The C++ against attention in float64, on random shapes, ranges and layouts."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import fold
from kernels.native import build
from kernels.native.backend import NativeBackend
from kernels.native.library import Library
from kernels.rows import DecodeRows, PrefillRows
from kernels.steps import EVERYTHING

CPU = torch.device("cpu")
DIMS = (16, 24, 33, 40, 48, 64, 80, 96, 128, 192, 256)

OTHER_WIDTH = ("-DREGISTERS=32", "-DWIDER_THAN_REGISTERS")


class Draw:
    """Random choices and tensors of one case."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def whole(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def among(self, *choices: Any) -> Any:
        return choices[self.whole(0, len(choices) - 1)]

    def tensor(self, *shape: int) -> Tensor:
        """Numbers around 1, often as a view of a larger buffer; the last axis is contiguous."""
        room = [size + self.among(0, 0, 3) for size in shape]
        whole = torch.randn(room, generator=self.generator)
        return whole[tuple(slice(0, size) for size in shape)]


def exact(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float, softcap: float | None, sink: float | None = None
) -> tuple[Tensor, Tensor]:
    """Of rows q [rows, head_dim] over k, v; `visible` [rows, keys]."""
    scores = q.double() @ k.double().T * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    values = v.double()
    if sink is not None:
        scores = torch.cat([scores, torch.full_like(scores[:, :1], sink)], 1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.clamp_min(-1e300)[:, None]) @ values, lse


@pytest.fixture
def draw(generator: torch.Generator, request: pytest.FixtureRequest) -> Draw:
    case = request.node.callspec.params.get("case", 0)
    return Draw(torch.Generator().manual_seed(generator.initial_seed() + case))


@pytest.fixture
def threads(draw: Draw) -> Iterator[int]:
    number = draw.among(1, 2, 3)
    torch.set_num_threads(number)
    yield number
    torch.set_num_threads(1)


def check_decode(
    native: NativeBackend,
    draw: Draw,
    dtype: torch.dtype,
    tolerance: float,
    *,
    dims: tuple[int, ...] = DIMS,
    longest: int = 1500,
) -> None:
    heads, group, slots = draw.whole(1, 3), draw.among(1, 2, 3, 4, 7), draw.whole(1, 5)
    dim, v_dim = draw.among(*dims), draw.among(*dims)
    keys = draw.among(draw.whole(0, 70), draw.whole(1, longest))
    counts = [draw.among(1, 1, draw.whole(1, 20)) for _ in range(slots)]
    lengths = [draw.among(0, draw.whole(0, 90)) for _ in range(slots)]
    window = draw.among(EVERYTHING, draw.whole(1, 40), draw.whole(1, keys + 90))
    softcap, scale = draw.among(None, 2.0, 30.0), draw.among(dim**-0.5, 0.3)
    sinks = draw.among(None, draw.tensor(heads * group) * 3)
    q = draw.tensor(heads * group, sum(counts), dim).to(dtype)
    k, v = draw.tensor(heads, keys, dim).to(dtype), draw.tensor(heads, keys, v_dim).to(dtype)
    room = max(a + b for a, b in zip(counts, lengths, strict=True)) + 4
    own_k = draw.tensor(slots + 1, heads, room, dim).to(dtype)
    own_v = draw.tensor(slots + 1, heads, room, v_dim).to(dtype)
    rows = DecodeRows(counts, lengths, CPU)
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if dtype == torch.bfloat16:  # what queries are multiplied by is rounded into them: larger scores have larger errors
        tolerance *= max(1.0, scale * dim**0.5)

    folded = draw.among(fold(q, heads), fold(draw.tensor(*q.shape).copy_(q), heads)).to(dtype)
    shared = native.shared(rows, folded, k, v, **how)
    found = native.own_and_merge(rows, folded, own_k, own_v, shared, sinks=sinks, **how)

    assert found.shape == (sum(counts), heads * group, v_dim)
    assert found.dtype == dtype
    for token, (slot, local) in enumerate(zip(rows.slots, rows.local.tolist(), strict=True)):
        position = keys + local
        at = torch.arange(keys + room)
        visible = (at <= position) & (at > position - window)
        for head in range(heads * group):
            whole_k = torch.cat([k[head // group], own_k[slot, head // group]])
            whole_v = torch.cat([v[head // group], own_v[slot, head // group]])
            sink = None if sinks is None else float(sinks[head])
            expected, _ = exact(
                q[head, token][None], whole_k, whole_v, visible[None], scale=scale, softcap=softcap, sink=sink
            )
            torch.testing.assert_close(found[token, head].double(), expected[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", range(24))
def test_decode_is_attention_over_document_and_own_tokens(
    case: int, native: NativeBackend, draw: Draw, threads: int
) -> None:
    check_decode(native, draw, torch.float32, 2e-5)


@pytest.mark.parametrize("case", range(24))
def test_decode_takes_bfloat16(case: int, native: NativeBackend, draw: Draw, threads: int) -> None:
    check_decode(native, draw, torch.bfloat16, 2e-2)


@pytest.mark.parametrize("case", range(16))
def test_decode_takes_bfloat16_in_multiples_of_tiles(
    case: int, native: NativeBackend, draw: Draw, threads: int
) -> None:
    check_decode(native, draw, torch.bfloat16, 2e-2, dims=(32, 64, 96, 128), longest=5000)


@pytest.mark.parametrize("case", range(20))
def test_prefill_is_causal_attention_of_the_last_tokens(
    case: int, native: NativeBackend, draw: Draw, threads: int
) -> None:
    check_prefill(native, draw, torch.float32, 2e-5)


@pytest.mark.parametrize("case", range(20))
def test_prefill_takes_bfloat16(case: int, native: NativeBackend, draw: Draw, threads: int) -> None:
    check_prefill(native, draw, torch.bfloat16, 2e-2)


def check_prefill(native: NativeBackend, draw: Draw, dtype: torch.dtype, tolerance: float) -> None:
    heads, group, dim, v_dim = draw.whole(1, 3), draw.among(1, 3, 4), draw.among(*DIMS), draw.among(*DIMS)
    tokens = draw.among(1, draw.whole(1, 40), draw.whole(100, 300))
    keys = tokens + draw.among(0, draw.whole(0, 1200))
    window = draw.among(EVERYTHING, draw.whole(1, 60), draw.whole(1, keys))
    softcap = draw.among(None, 2.0, 30.0)
    q = draw.among(draw.tensor(heads * group, tokens, dim), draw.tensor(tokens, heads * group, dim).transpose(0, 1))
    q, k, v = q.to(dtype), draw.tensor(heads, keys, dim).to(dtype), draw.tensor(heads, keys, v_dim).to(dtype)

    found = native.prefill(PrefillRows(tokens, CPU), q, k, v, scale=dim**-0.5, window=window, softcap=softcap)

    at = torch.arange(keys)
    position = torch.arange(keys - tokens, keys)[:, None]
    visible = (at <= position) & (at > position - window)
    for head in range(heads * group):
        expected, lse = exact(q[head], k[head // group], v[head // group], visible, scale=dim**-0.5, softcap=softcap)
        out = found.out[head // group].view(tokens, group, v_dim)[:, head % group]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        found_lse = found.lse[head // group].view(tokens, group)[:, head % group]
        torch.testing.assert_close(found_lse.double(), lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("group", [1, 9])
@pytest.mark.parametrize("dim", [64, 40])
def test_a_row_that_sees_no_key_is_zero_and_minus_infinity(group: int, dim: int, native: NativeBackend) -> None:
    q, k = torch.randn(2, group, dim), torch.randn(2, 50, dim)
    rows = DecodeRows([1], [30], CPU)

    found = native.shared(rows, q, k, k, scale=1.0, window=20, softcap=None)

    assert (found.out == 0).all()
    assert (found.lse == float("-inf")).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("group", [1, 9])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_is_not_a_number_comes_out_as_none(
    where: str, number: float, group: int, softcap: float | None, dtype: torch.dtype, native: NativeBackend
) -> None:
    given = {"q": torch.rand(2, group, 64) + 0.1, "k": torch.rand(2, 90, 64) + 0.1, "v": torch.rand(2, 90, 64)}
    given = {name: tensor.to(dtype) for name, tensor in given.items()}
    given[where][1, 0, 3] = number
    rows = DecodeRows([1], [0], CPU)
    own = torch.rand(1, 2, 8, 64).to(dtype)
    how: dict[str, Any] = {"scale": 0.125, "window": EVERYTHING, "softcap": softcap}

    shared = native.shared(rows, *given.values(), **how)
    out = native.own_and_merge(rows, given["q"], own, own, shared, **how)

    capped = number == float("inf") and where != "v" and softcap is not None  # an infinite score is the cap then
    assert out[0, group].isfinite().all() == capped
    assert out[0, :group].isfinite().all()
    assert capped or not out[0, group].isfinite()[3]


def test_no_second_openmp_comes_beside_torchs(native: NativeBackend) -> None:
    torch.set_num_threads(3)
    q = torch.randn(6, 200, 64)
    native.prefill(PrefillRows(200, CPU), q, q, q, scale=1.0, window=EVERYTHING, softcap=None)
    torch.set_num_threads(1)

    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([path for path in mapped if "omp" in Path(path).name and ".so" in path]) == 1
    assert native.library._parallel is not None


def test_a_far_larger_score_takes_all_the_weight(native: NativeBackend) -> None:
    q, k, v = torch.ones(1, 5, 64), torch.zeros(1, 300, 64), torch.randn(1, 300, 64)
    k[0, 200] = 1e4

    found = native.prefill(PrefillRows(5, CPU), q, k, v, scale=1.0, window=EVERYTHING, softcap=None)

    assert torch.equal(found.out[0], v[0, 200].expand(5, -1))
    torch.testing.assert_close(found.lse[0], torch.full((5,), 64e4))


@pytest.mark.parametrize("scores", ["rising", "falling", "jumping", "far below"])
def test_scores_that_move_late_are_followed_in_bfloat16(scores: str, native: NativeBackend) -> None:
    """Whole numbers, so that no score is rounded: in log 2, as they are kept."""
    generator = torch.Generator().manual_seed(1)
    at = torch.arange(2000)
    ramp = {
        "rising": at // 8 - 125,
        "falling": 125 - at // 8,
        "jumping": torch.where(at == 1500, 120, at % 7),
        "far below": torch.where(at < 1000, 100, -200),
    }[scores]
    q, k = (torch.randint(-1, 2, (1, count, 64), generator=generator).to(torch.bfloat16) for count in (60, 2000))
    v = torch.randn(1, 2000, 64, generator=generator).to(torch.bfloat16)
    q[:, :, 0], k[0, :, 0] = 1, ramp.to(torch.bfloat16)

    found = native.shared(
        DecodeRows([1] * 20, [5] * 20, CPU), q, k, v, scale=math.log(2), window=EVERYTHING, softcap=None
    )

    expected, lse = exact(q[0], k[0], v[0], torch.ones(60, 2000, dtype=torch.bool), scale=math.log(2), softcap=None)
    torch.testing.assert_close(found.out[0, 0].double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found.lse[0, 0].double(), lse, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_late_key_that_is_no_number_is_seen_in_bfloat16(number: float, native: NativeBackend) -> None:
    q, k, v = ((torch.rand(1, count, 64) + 0.1).to(torch.bfloat16) for count in (60, 2000, 2000))
    k[0, 1700, 3] = number

    found = native.shared(DecodeRows([1] * 20, [5] * 20, CPU), q, k, v, scale=0.125, window=EVERYTHING, softcap=None)

    assert found.out.isfinite().any() == (number == float("-inf"))  # which gets no weight


@pytest.mark.parametrize("case", range(1))
def test_where_tiles_are_not_allowed_vectors_compute_the_same(
    case: int, native: NativeBackend, draw: Draw, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.library.pairs < 2:
        pytest.skip("this CPU has no AMX tiles")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DNO_TILES"))
    other = NativeBackend(Library(build.build(tmp_path)))

    assert other.library.pairs == 1
    for _ in range(8):
        check_decode(other, draw, torch.bfloat16, 2e-2)
        check_decode(other, draw, torch.bfloat16, 2e-2, dims=(32, 64, 96, 128))
        check_prefill(other, draw, torch.bfloat16, 2e-2)


@pytest.mark.parametrize("lanes", [4, 16])
def test_other_vector_widths_compute_the_same(
    lanes: int, draw: Draw, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, f"-DLANES={lanes}", *OTHER_WIDTH))
    other = NativeBackend(Library(build.build(tmp_path)))

    for _ in range(8):
        check_decode(other, draw, torch.float32, 2e-5)
