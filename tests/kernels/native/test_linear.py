"""Linear layers for few rows, against float64."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kernels import backend
from kernels.backend import quicken_model
from kernels.native import linear
from kernels.native.backend import NativeBackend
from kernels.native.build import BuildFailed
from kernels.native.library import Library, LinearCall, pointer
from kernels.native.linear import MOST_ROWS, PAIR_DEPTH, PAIR_ROWS, NativeLinear, quicken
from tests.kernels.conftest import SEED

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library(native: NativeBackend) -> Library:
    return native.library


@given(
    rows=st.integers(1, MOST_ROWS + 3),
    size=st.integers(1, 200) | st.sampled_from([511, 512, 513, 1100]),
    out=st.integers(1, 150),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=60, deadline=None, database=None)
def test_any_shape_is_right(library: Library, rows: int, size: int, out: int, has_bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(SEED + seed)
    layer = nn.Linear(size, out, bias=has_bias)
    quicken(layer, library)
    wide = torch.randn((1, rows, size + 5), generator=generator)
    for x in (wide[..., :size], wide[..., 5:].contiguous(), wide[..., :size].transpose(1, 2).contiguous().mT):
        with torch.inference_mode():
            found = layer(x)
        expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if has_bias else None)
        assert type(layer) is NativeLinear
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@given(
    rows=st.integers(1, 50) | st.sampled_from([256, 257, 300]),
    depth=st.integers(1, 9) | st.sampled_from([33, 40]),
    outs=st.integers(1, 20),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=60, deadline=None, database=None)
def test_bfloat16_in_pairs_loses_no_more_than_rounding_its_input(
    library: Library, rows: int, depth: int, outs: int, has_bias: bool, seed: int
) -> None:
    if not library.pairs:
        pytest.skip("this CPU does not multiply bfloat16 in pairs")
    generator = torch.Generator().manual_seed(SEED + seed)
    size, out_features = depth * PAIR_DEPTH, outs * PAIR_ROWS
    x = torch.randn((rows, size + 5), generator=generator)[:, :size]
    w = torch.randn((out_features, size), generator=generator).bfloat16()
    bias = torch.randn(out_features, generator=generator) if has_bias else None
    found = torch.empty((rows, out_features))

    library.linear(
        LinearCall(
            x=pointer(x), w=pointer(w), bias=pointer(bias), out=pointer(found), rows=rows, **{"in": size},
            out_features=out_features, x_row=x.stride(0), pairs=True,
        )
    )  # fmt: skip

    expected = nn.functional.linear(x.bfloat16().double(), w.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-4)


def test_nan_stays_nan(library: Library) -> None:
    layer = nn.Linear(40, 9)
    quicken(layer, library)
    x = torch.ones(3, 40)
    x[1, 39] = float("nan")

    with torch.inference_mode():
        found = layer(x)

    assert found.isnan().any(1).tolist() == [False, True, False]


def test_only_plain_float32_layers_are_changed(library: Library) -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), Own(4, 4))
    weight = model[0].weight

    quicken(model, library)

    assert [type(layer) for layer in model] == [NativeLinear, nn.Linear, Own]
    assert model[0].weight is weight
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("fault", ["no compiler", "wrong", "nan"])
def test_layers_stay_as_they_are_where_native_code_fails(
    fault: str, library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> Library:
        raise BuildFailed("there is no C++ compiler")

    monkeypatch.setattr(backend, "load_library", failing if fault == "no compiler" else lambda: library)
    if fault != "no compiler":
        monkeypatch.setattr(linear, "largest_error", lambda _: float("nan") if fault == "nan" else 0.5)
    model = nn.Sequential(nn.Linear(4, 4))

    with caplog.at_level(logging.WARNING):
        quicken_model(model, CPU)

    assert type(model[0]) is nn.Linear
    assert len(caplog.messages) == 1
