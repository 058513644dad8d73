"""Each op of `platemaker doctor --device`: right on the CPU, and able to fail."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels import device_check, device_ops, sampling
from kernels.attention import Attended
from kernels.codecs.none import Plain
from kernels.device_check import OpResult, check_device
from kernels.device_ops import Op, ops_of, sampling_op
from kernels.errors import DeviceUnavailable
from kernels.native.build import BuildFailed
from kernels.torch_backend import TorchBackend

CPU = torch.device("cpu")


def tried(name: str, implementation: str = "torch", dtype: torch.dtype = torch.float32) -> OpResult:
    found = [
        op for op in [*ops_of(CPU, dtype), sampling_op(CPU)] if (op.name, op.implementation) == (name, implementation)
    ]
    return device_check._try(found[0], str(dtype), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_op_is_right_on_the_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "DTYPES", (dtype,))

    results = list(check_device("cpu"))

    assert [result for result in results if result.state == "failed"] == []
    for result in results:
        assert (result.error is None) == (result.ms is None) == (result.state == "unavailable")
        assert bool(result.detail) == (result.state != "ok")


def test_a_device_that_is_not_there_is_refused_before_anything_runs() -> None:
    with pytest.raises(DeviceUnavailable):
        check_device("toaster")


def test_an_op_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("the driver is gone\nand more of it")

    def ops(device: torch.device, dtype: torch.dtype) -> list[Op]:
        return [Op("first", "torch", 0.0, broken), sampling_op(device)]

    monkeypatch.setattr(device_check, "ops_of", ops)
    monkeypatch.setattr(device_check, "DTYPES", (torch.float32,))

    results = list(check_device("cpu"))

    assert [result.state for result in results] == ["failed", "ok", "ok"]
    assert results[0].detail == "RuntimeError: the driver is gone"
    assert results[0].error is None


def losing(name: str, value: Any) -> Callable[..., Any]:
    """The backend's function, deaf to one of its arguments."""
    honest = TorchBackend.own_and_merge

    def tampered(self: TorchBackend, *of: Any, **how: Any) -> Tensor:
        return honest(self, *of, **how | {name: value})

    return tampered


@pytest.mark.parametrize(
    ("op", "lost", "value"),
    [
        ("sliding window", "window", 1 << 40),
        ("softcap", "softcap", None),
        ("sinks", "sinks", None),
        ("own tokens, merged", "scale", 0.2),
        ("latent attention", "scale", 0.2),
    ],
)
def test_an_attention_that_loses_something_fails(
    op: str, lost: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "own_and_merge", losing(lost, value))

    result = tried(op)

    assert result.state == "failed"
    assert result.error is not None
    assert result.error > 10 * result.tolerance


@pytest.mark.parametrize("wrong", [float("nan"), 0.01])
def test_a_wrong_log_sum_exp_fails_and_so_does_what_is_no_number(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TorchBackend.shared

    def tampered(self: TorchBackend, *of: Any, **how: Any) -> Attended:
        part = honest(self, *of, **how)
        return part._replace(lse=part.lse + wrong)

    monkeypatch.setattr(TorchBackend, "shared", tampered)

    assert tried("shared prefix").state == "failed"


def test_a_linear_layer_a_codec_a_copy_and_a_draw_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("linear, few rows", "codec none", "to the device and back", "sampling")
    assert [tried(name).state for name in names] == ["ok"] * 4
    linear, argmax, clone = nn.Linear.forward, sampling._argmax, Tensor.clone
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: linear(self, x) * 1.001)
    monkeypatch.setattr(Plain, "encode", lambda self, kind, tensor: {"": tensor.cpu() + 1e-3})
    monkeypatch.setattr(Tensor, "clone", lambda self, **how: clone(self, **how) + 1)
    monkeypatch.setattr(sampling, "_argmax", lambda logits: [token + 1 for token in argmax(logits)])

    assert [tried(name).state for name in names] == ["failed"] * 4


def test_what_is_not_installed_is_unavailable_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise BuildFailed("there is no compiler")

    monkeypatch.setattr(device_ops, "load_library", refuse)
    monkeypatch.setattr(device_ops, "made_for", lambda device, dtype: ("native code", refuse))

    for op in ("linear, few rows", "prefill"):
        result = tried(op, "native")

        assert result.state == "unavailable"
        assert "there is no compiler" in result.detail
        assert dataclasses.replace(result, detail="").error is None
