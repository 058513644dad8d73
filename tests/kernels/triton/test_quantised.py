import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.codecs.affine import Quantised, dequantise
from kernels.codecs.base import CHANNELS, TOKENS
from kernels.codecs.int8 import Int8
from tests.kernels.triton.cases import NO_TRITON, Case, assert_close, cases, few

pytest.importorskip("triton", reason=NO_TRITON)

from kernels.triton.launch import pick_int8_blocks
from kernels.triton.quantised import QuantisedKV, quantise_kv, quantised_prefix


def restored(kv: QuantisedKV) -> tuple[torch.Tensor, torch.Tensor]:
    keys = dequantise(Quantised(kv.k, kv.k_scale, kv.k_low), axis=TOKENS, group=kv.chunk_tokens)
    values = Quantised(kv.v, kv.v_scale[..., None], kv.v_low[..., None])
    return keys, dequantise(values, axis=CHANNELS, group=kv.v.shape[-1])


@given(case=cases(), chunk_tokens=st.sampled_from([16, 48, 128, 512]))
@few
def test_attention_over_int8_kv_equals_that_over_the_numbers_it_stands_for(
    case: Case, chunk_tokens: int, device: torch.device
) -> None:
    kv = quantise_kv(case.k, case.v, chunk_tokens)
    k, v = restored(kv)
    expected = Case(case.q, k, v, case.first, None, case.scale, case.softcap).expected()
    here = case.on(device)

    found = quantised_prefix(
        here.q, QuantisedKV(*(part.to(device) for part in kv[:-1]), chunk_tokens),
        scale=here.scale, softcap=here.softcap, first=here.first, begin=case.begin,
    )  # fmt: skip

    assert_close(found, expected, case.tolerance)


def test_int8_kv_is_what_the_codec_stores(generator: torch.Generator) -> None:
    k, v = (torch.randn((2, 32, 48), generator=generator).to(torch.bfloat16) for _ in range(2))

    kv = quantise_kv(k, v, 16)

    for chunk in range(2):
        part = slice(16 * chunk, 16 * (chunk + 1))
        keys, values = Int8().encode("k", k[:, part]), Int8().encode("v", v[:, part])
        assert torch.equal(kv.k[:, part], keys["q"]) and torch.equal(kv.v[:, part], values["q"])
        assert torch.equal(kv.k_scale[:, chunk], keys["scale"][:, 0])
        assert torch.equal(kv.k_low[:, chunk], keys["low"][:, 0])
        assert torch.equal(kv.v_scale[:, part], values["scale"][..., 0])
        assert torch.equal(kv.v_low[:, part], values["low"][..., 0])


def test_chunks_that_cannot_be_cut_into_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks of 100"):
        pick_int8_blocks(64, 128, 128, torch.bfloat16, 100)
