import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from kernels.codecs import decode_chunk, encode_chunk
from kernels.errors import ChunkMismatch
from kernels.kv import PrefixKV

LAYERS, HEADS, TOKENS = 3, 2, 10
# SHA-256 of the encoding of fixed_kv's tokens 1 to 5. Stored snapshots depend on it: a change needs a new format.
GOLDEN = {
    "float32": "1a185ba1e82bcf44083f99e5aa2cc717834765c52c72fb36e1e2eeb8fa424d86",
    "bfloat16": "671341df0d48b33e2ed40274e77d2cc584e34686b62dfb39a3a36456521a4547",
}


def make_kv(values: torch.Tensor) -> PrefixKV:
    """Values [layers, 2, heads, tokens, dim]; the values of V are cut to another head_dim."""
    kv = PrefixKV(TOKENS)
    for layer in range(LAYERS):
        kv.write(layer, 0, values[layer, 0], values[layer, 1, :, :, :4].contiguous())
    kv.length = TOKENS
    return kv


def fixed_kv(dtype: str) -> PrefixKV:
    count = LAYERS * 2 * HEADS * TOKENS * 8
    values = (torch.arange(count) % 251 - 125) / 8  # exact in bfloat16 too
    return make_kv(values.reshape(LAYERS, 2, HEADS, TOKENS, 8).to(getattr(torch, dtype)))


@pytest.fixture
def chunk() -> bytes:
    return encode_chunk(fixed_kv("float32"), 0, 4, "none")


def decode_into_fresh(data: bytes) -> None:
    decode_chunk(data, PrefixKV(TOKENS), 0, 4, codec="none", dtype="float32", device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_come_back_bit_by_bit(dtype: str, generator: torch.Generator) -> None:
    bits = torch.int32 if dtype == "float32" else torch.int16
    kv = make_kv(torch.randn((LAYERS, 2, HEADS, TOKENS, 8), generator=generator).to(getattr(torch, dtype)))
    with torch.inference_mode():
        kv.keys[0][0, 0, :3] = torch.tensor([float("inf"), -0.0, float("nan")])

    loaded = PrefixKV(TOKENS)
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        decode_chunk(
            encode_chunk(kv, start, stop, "none"), loaded, start, stop, codec="none", dtype=dtype, device="cpu"
        )

    assert loaded.num_layers == LAYERS
    for layer in range(LAYERS):
        assert torch.equal(loaded.keys[layer].view(bits), kv.keys[layer].view(bits))
        assert torch.equal(loaded.values[layer].view(bits), kv.values[layer].view(bits))


@pytest.mark.parametrize("dtype", GOLDEN)
def test_the_bytes_of_a_chunk_never_change(dtype: str) -> None:
    data = encode_chunk(fixed_kv(dtype), 1, 6, "none")

    assert hashlib.sha256(data).hexdigest() == GOLDEN[dtype]


def test_a_chunk_has_the_documented_layout() -> None:
    kv = fixed_kv("bfloat16")

    tensors = load(encode_chunk(kv, 2, 5, "none"))

    assert set(tensors) == {f"{part}.{layer}" for part in "kv" for layer in range(LAYERS)}
    for layer in range(LAYERS):
        assert torch.equal(tensors[f"k.{layer}"], kv.keys[layer][:, 2:5])
        assert torch.equal(tensors[f"v.{layer}"], kv.values[layer][:, 2:5])


def test_the_tokens_around_a_chunk_are_left_alone(chunk: bytes) -> None:
    kv = fixed_kv("float32")
    before = {layer: tensor.clone() for layer, tensor in kv.keys.items()}

    decode_chunk(chunk, kv, 3, 7, codec="none", dtype="float32", device="cpu")

    for layer, old in before.items():
        assert torch.equal(kv.keys[layer][:, 3:7], old[:, :4])
        assert torch.equal(kv.keys[layer][:, :3], old[:, :3])
        assert torch.equal(kv.keys[layer][:, 7:], old[:, 7:])


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ChunkMismatch, match="bfloat16, not float32"):
        decode_into_fresh(encode_chunk(fixed_kv("bfloat16"), 0, 4, "none"))


def test_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(ChunkMismatch, match="not 4 tokens"):
        decode_into_fresh(encode_chunk(fixed_kv("float32"), 0, 5, "none"))


@pytest.mark.parametrize("lost", ["k.0", "v.1", "k.2"])
def test_a_chunk_without_one_of_its_tensors_is_refused(chunk: bytes, lost: str) -> None:
    tensors = load(chunk)
    del tensors[lost]

    with pytest.raises(ChunkMismatch, match="layers are not complete"):
        decode_into_fresh(save(tensors))


def test_a_chunk_without_a_layer_in_the_middle_is_refused(chunk: bytes) -> None:
    tensors = {name: tensor for name, tensor in load(chunk).items() if not name.endswith(".1")}

    with pytest.raises(ChunkMismatch, match="layers are not complete"):
        decode_into_fresh(save(tensors))


def test_a_chunk_with_other_layers_than_the_chunk_before_is_refused(chunk: bytes) -> None:
    kv = PrefixKV(TOKENS)
    decode_chunk(chunk, kv, 0, 4, codec="none", dtype="float32", device="cpu")
    fewer = {name: tensor for name, tensor in load(chunk).items() if not name.endswith(".2")}

    with pytest.raises(ChunkMismatch):
        decode_chunk(save(fewer), kv, 4, 8, codec="none", dtype="float32", device="cpu")


@pytest.mark.parametrize("shape", [(1, 4, 8), (2, 4, 1), (3, 4, 8), (2, 4, 16)])
def test_a_chunk_of_other_heads_than_the_chunk_before_is_refused(chunk: bytes, shape: tuple[int, ...]) -> None:
    kv = PrefixKV(TOKENS)
    decode_chunk(chunk, kv, 0, 4, codec="none", dtype="float32", device="cpu")

    with pytest.raises(ChunkMismatch):
        decode_chunk(
            save(load(chunk) | {"k.1": torch.zeros(shape)}), kv, 4, 8, codec="none", dtype="float32", device="cpu"
        )


def test_a_refused_chunk_changes_nothing(chunk: bytes) -> None:
    kv = fixed_kv("float32")
    before = {layer: tensor.clone() for layer, tensor in kv.keys.items()}

    with pytest.raises(ChunkMismatch):
        decode_chunk(
            save(load(chunk) | {"v.2": torch.ones(2, 3, 4)}), kv, 4, 8, codec="none", dtype="float32", device="cpu"
        )

    assert all(torch.equal(kv.keys[layer], old) for layer, old in before.items())


@pytest.mark.parametrize("left", [0, 1, 7, 8, 9, 100, -4, -1])
def test_a_truncated_chunk_is_refused(chunk: bytes, left: int) -> None:
    with pytest.raises(ChunkMismatch):
        decode_into_fresh(chunk[:left])


def test_a_chunk_with_bytes_behind_it_is_refused(chunk: bytes) -> None:
    with pytest.raises(ChunkMismatch):
        decode_into_fresh(chunk + b"\0")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F8_E8M0", "I32", "C64", "F99"])
def test_other_kinds_of_numbers_are_refused(dtype: str) -> None:
    size = {"F4": 2, "F6_E2M3": 3, "F8_E8M0": 4, "C64": 32}.get(dtype, 16)
    entry = {"dtype": dtype, "shape": [1, 4, 1]}
    header = json.dumps(
        {"k.0": entry | {"data_offsets": [0, size]}, "v.0": entry | {"data_offsets": [size, 2 * size]}}
    ).encode()

    with pytest.raises(ChunkMismatch):
        decode_into_fresh(len(header).to_bytes(8, "little") + header + bytes(2 * size))


def test_a_chunk_without_any_layer_is_refused() -> None:
    with pytest.raises(ChunkMismatch, match="layers are not complete"):
        decode_into_fresh(save({}))


@given(data=st.binary(max_size=300))
@settings(deadline=None, database=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ChunkMismatch):
        decode_into_fresh(data)


@given(data=st.data())
@settings(max_examples=300, deadline=None, database=None)
def test_a_damaged_header_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever the header says after the damage: a ChunkMismatch, or tensors of the expected shape and type."""
    chunk = bytearray(encode_chunk(fixed_kv("float32"), 0, 4, "none"))
    header_end = 8 + int.from_bytes(chunk[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        chunk[data.draw(st.integers(0, header_end - 1))] = data.draw(
            st.integers(0, 255) | st.sampled_from(b'"[]{}:,0123')
        )
    try:
        decode_into_fresh(bytes(chunk))
    except ChunkMismatch as exc:
        assert exc.what
