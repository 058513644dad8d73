import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import backend, flash
from kernels.attention import Attended, attend, fold, plan_blocks, unfold
from kernels.backend import AttentionBackend, largest_error, pick_backend
from kernels.flash import flash_attend
from kernels.rows import DecodeRows, PrefillRows
from kernels.steps import EVERYTHING
from kernels.torch_backend import TorchBackend
from tests.kernels.exact import naive

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "native", "triton"])
def chosen(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "torch":
        return TorchBackend()
    if request.param == "native":
        found: AttentionBackend = request.getfixturevalue("native")
        return found
    pytest.importorskip("triton", reason="Triton is not installed; pip install 'platemaker[test]' brings it")
    from kernels.triton.backend import TritonBackend

    return TritonBackend()


@pytest.mark.parametrize(("window", "softcap"), [(EVERYTHING, None), (40, 5.0), (3, None)])
def test_a_backend_attends_to_the_document_and_to_the_own_slot(
    chosen: AttentionBackend, window: int, softcap: float | None, generator: torch.Generator
) -> None:
    heads, group, dim, length = 2, 3, 32, 90
    how: dict[str, Any] = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    k, v = (torch.randn((heads, length, dim), generator=generator) for _ in range(2))
    own_k, own_v = (torch.randn((3, heads, 60, dim), generator=generator) for _ in range(2))
    counts, lengths = [4, 1, 2], [0, 33, 50]
    q = torch.randn((heads * group, sum(counts), dim), generator=generator)

    rows, folded = DecodeRows(counts, lengths, CPU), fold(q, heads)
    shared = chosen.shared(rows, folded, k, v, **how)
    found = chosen.own_and_merge(rows, folded, own_k, own_v, shared, **how)

    for token, (slot, local) in enumerate(zip(rows.slots, rows.local.tolist(), strict=True)):
        keys, values = torch.cat([k, own_k[slot]], 1), torch.cat([v, own_v[slot]], 1)
        at = length + local
        positions = torch.arange(length + 60)
        seen = (positions <= at) & (positions > at - window)
        expected, _ = naive(q[:, token, None], keys, values, seen[None], scale=how["scale"], softcap=softcap)
        torch.testing.assert_close(found[token].double(), expected[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize(("window", "softcap"), [(EVERYTHING, None), (40, 5.0), (3, None)])
def test_a_backend_reads_the_last_tokens_of_a_document(
    chosen: AttentionBackend, window: int, softcap: float | None, generator: torch.Generator
) -> None:
    heads, group, dim, length, tokens = 2, 3, 32, 90, 30
    how: dict[str, Any] = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    k, v = (torch.randn((heads, length, dim), generator=generator) for _ in range(2))
    q = torch.randn((heads * group, tokens, dim), generator=generator)
    positions = torch.arange(length - tokens, length)[:, None]
    seen = (torch.arange(length) <= positions) & (torch.arange(length) > positions - window)

    found = chosen.prefill(PrefillRows(tokens, CPU), q, k, v, **how)

    expected, lse = naive(q, k, v, seen, scale=how["scale"], softcap=softcap)
    torch.testing.assert_close(unfold(found.out, tokens).double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.lse.double(), fold(lse[..., None], heads)[..., 0], atol=2e-5, rtol=0)


def test_sinks_are_one_more_key_without_value(chosen: AttentionBackend, generator: torch.Generator) -> None:
    heads, group, dim = 2, 2, 32
    rows = DecodeRows([1, 2], [0, 4], CPU)
    q = torch.randn((heads, 3 * group, dim), generator=generator)
    k, v, own_k, own_v = (torch.randn((heads, 50, dim), generator=generator) for _ in range(4))
    own_k, own_v = own_k[None].expand(2, -1, -1, -1), own_v[None].expand(2, -1, -1, -1)
    sinks = torch.randn((heads * group,), generator=generator) * 3
    how: dict[str, Any] = {"scale": dim**-0.5, "window": EVERYTHING, "softcap": None}
    shared = chosen.shared(rows, q, k, v, **how)

    plain = chosen.own_and_merge(rows, q, own_k, own_v, shared, **how)
    found = chosen.own_and_merge(rows, q, own_k, own_v, shared, sinks=sinks, **how)
    flat = chosen.own_and_merge(rows, q, own_k, torch.ones_like(own_v), _ones(shared), sinks=sinks, **how)

    torch.testing.assert_close(found, plain * flat, atol=1e-5, rtol=0)  # flat is 1 - the sink's weight


def _ones(shared: Attended) -> Attended:
    return Attended(torch.ones_like(shared.out), shared.lse)


def played(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """In the place of a device's own flash attention."""
    rows, keys = q.shape[2], k.shape[2]
    assert not causal or rows == keys
    stop = torch.arange(1, rows + 1) if causal else torch.full((rows,), keys)
    group = q.shape[1] // k.shape[1]
    blocks = plan_blocks(torch.zeros_like(stop), stop, device=CPU)
    k, v = (part[0].repeat_interleave(group, 0) for part in (k, v))
    part = attend(q[0], k, v, blocks, scale=scale)
    return part.out[None].to(q.dtype), part.lse[None]


@pytest.fixture
def device_flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[flash.Flash], None]]:
    """Gives the CPU an attention of its own."""
    flash._is_right.cache_clear()
    monkeypatch.setattr(flash, "HALVES", (torch.float32,))
    yield lambda own: monkeypatch.setitem(flash.DEVICES, "cpu", flash.Device(own, 128))
    flash._is_right.cache_clear()


@pytest.mark.parametrize("keys", [20, 57])
def test_flash_in_two_parts_is_causal_attention_of_the_last_tokens(
    keys: int, device_flash: Callable[[flash.Flash], None], generator: torch.Generator
) -> None:
    q = torch.randn((4, 20, 16), generator=generator)
    k, v = (torch.randn((2, 57, 16), generator=generator)[:, :keys] for _ in range(2))
    expected = flash_attend(q, k, v, scale=0.3, window=EVERYTHING)
    device_flash(played)

    found = flash_attend(q, k, v, scale=0.3, window=EVERYTHING)

    assert flash.can_flash(q, k, v, window=EVERYTHING, softcap=None)
    torch.testing.assert_close(found.out, expected.out, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_a_flash_attention_that_fails_is_not_used_and_the_log_says_so(
    fault: str,
    device_flash: Callable[[flash.Flash], None],
    generator: torch.Generator,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def faulty(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if fault == "missing":
            raise NotImplementedError("no such operator")
        return played(q, k, v, causal=causal, scale=scale * 1.1)

    device_flash(faulty)
    q, k = torch.randn((4, 5, 16), generator=generator), torch.randn((2, 9, 16), generator=generator)

    with caplog.at_level(logging.WARNING):
        uses = [flash.can_flash(q, k, k, window=EVERYTHING, softcap=None) for _ in range(2)]

    assert uses == [False, False]
    assert len(caplog.messages) == 1


def test_windows_and_softcaps_are_not_left_to_flash(
    device_flash: Callable[[flash.Flash], None], generator: torch.Generator
) -> None:
    device_flash(played)
    q, k = torch.randn((4, 5, 16), generator=generator), torch.randn((2, 9, 16), generator=generator)

    assert flash.can_flash(q, k, k, window=9, softcap=None)
    assert not flash.can_flash(q, k, k, window=8, softcap=None)
    assert not flash.can_flash(q, k, k, window=9, softcap=5.0)
    assert not flash.can_flash(q, k, k[..., :8], window=9, softcap=None)


def test_what_nothing_is_made_for_uses_plain_torch_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pick_backend.cache_clear()

    assert pick_backend(CPU, 64, torch.float16).name == "torch"
    assert pick_backend(torch.device("cuda"), 64, torch.float32).name == "torch"
    assert not caplog.messages


@pytest.mark.parametrize("fault", ["missing", "broken", "wrong"])
def test_a_device_whose_kernels_fail_uses_plain_torch_and_says_why(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "TRITON_DEVICES", ("cpu",))
    pick_backend.cache_clear()
    if fault == "missing":
        monkeypatch.setitem(sys.modules, "kernels.triton.backend", None)
    elif fault == "broken":
        monkeypatch.setattr(backend, "_triton", lambda: 1 / 0)
    else:
        monkeypatch.setattr(backend, "_triton", TorchBackend)
        monkeypatch.setattr(backend, "largest_error", lambda *_: float("nan"))

    with caplog.at_level(logging.WARNING):
        found = pick_backend(CPU, 64, torch.bfloat16)

    pick_backend.cache_clear()
    assert found.name == "torch"
    assert len(caplog.messages) == 1
    assert "plain torch" in caplog.messages[0]


def test_the_check_passes_for_kernels_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; pip install 'platemaker[test]' brings it")
    monkeypatch.setattr(backend, "TRITON_DEVICES", ("cpu",))
    pick_backend.cache_clear()

    assert pick_backend(CPU, 48, torch.bfloat16).name == "triton"

    pick_backend.cache_clear()


@pytest.mark.parametrize("lost", ["window", "softcap", "scale"])
def test_the_check_notices_what_is_lost(lost: str) -> None:
    class Tampered(TorchBackend):
        def shared(self, *of: Any, **how: Any) -> Attended:
            how[lost] = {"window": EVERYTHING, "softcap": None, "scale": how["scale"] * 1.1}[lost]
            return super().shared(*of, **how)

    assert largest_error(Tampered(), TorchBackend(), CPU, 64, torch.float32) > 1e-2
