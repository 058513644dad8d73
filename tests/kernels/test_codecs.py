"""Every codec: what comes back, how far off, how small, and what is refused."""

import json
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from kernels.codecs import CODECS, decode_chunk, encode_chunk
from kernels.codecs.chunk import Header
from kernels.codecs.layout import OWN_KEY
from kernels.errors import ChunkMismatch, NonFiniteKV
from kernels.kv import PrefixKV
from kernels.settings import CodecName

LOSSLESS = [name for name, codec in CODECS.items() if codec.lossless]
LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]
WITH_HEADER = [name for name in CODECS if name != "none"]
DTYPES = ["float32", "bfloat16", "float16"]
LARGEST_ERROR = {"int8": 0.01, "fp8": 0.05, "int4": 0.15}  # relative, l2, of normally distributed numbers


def kv_of(*layers: tuple[Tensor, Tensor]) -> PrefixKV:
    kv = PrefixKV(layers[0][0].shape[1])
    for layer, (k, v) in enumerate(layers):
        kv.write(layer, 0, k, v)
    kv.length = kv.capacity
    return kv


def random_kv(
    seed: int, *, layers: int = 2, heads: int = 2, tokens: int = 70, dim: int = 32, dtype: str = "float32"
) -> PrefixKV:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((layers, 2, heads, tokens, dim), generator=generator).to(getattr(torch, dtype))
    return kv_of(*((pair[0], pair[1]) for pair in values))


def round_trip(kv: PrefixKV, codec: str) -> PrefixKV:
    dtype = str(kv.keys[0].dtype).removeprefix("torch.")
    loaded = PrefixKV(kv.capacity)
    data = encode_chunk(kv, 0, kv.capacity, codec)
    decode_chunk(data, loaded, 0, kv.capacity, codec=codec, dtype=dtype, device="cpu")
    return loaded


def refuse(data: bytes, *, codec: str, dtype: str = "float32", tokens: int = 70, match: str | None = None) -> None:
    kv = PrefixKV(tokens)
    with pytest.raises(ChunkMismatch, match=match):
        decode_chunk(data, kv, 0, tokens, codec=codec, dtype=dtype, device="cpu")
    assert kv.num_layers == 0


def rebuild(data: bytes, change: Callable[[dict[str, Tensor]], None], header: Header | None = None) -> bytes:
    """The chunk with other parts, and with another header if one is given."""
    parts = load(data)
    change(parts)
    return bytes(save(parts, {OWN_KEY: (header or header_of(data)).model_dump_json()}))


def header_of(data: bytes) -> Header:
    size = int.from_bytes(data[:8], "little")
    return Header.model_validate_json(json.loads(data[8 : 8 + size])["__metadata__"][OWN_KEY])


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def test_the_setting_offers_every_codec() -> None:
    assert set(get_args(CodecName)) == set(CODECS)


@given(
    codec=st.sampled_from(LOSSLESS),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 9)),
    value_dim=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, database=None)
def test_a_lossless_codec_gives_every_bit_back(
    codec: str, dtype: str, shape: tuple[int, int, int], value_dim: int, seed: int
) -> None:
    """Any bits at all, so NaN, infinities, subnormals and both zeros are among them."""
    generator = torch.Generator().manual_seed(seed)
    size = getattr(torch, dtype).itemsize
    bits = [
        torch.randint(0, 256, (*shape[:2], dim * size), generator=generator, dtype=torch.uint8)
        for dim in (shape[2], value_dim)
    ]
    kv = kv_of((bits[0].view(getattr(torch, dtype)), bits[1].view(getattr(torch, dtype))))

    loaded = round_trip(kv, codec)

    assert torch.equal(loaded.keys[0].view(torch.uint8), bits[0])
    assert torch.equal(loaded.values[0].view(torch.uint8), bits[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", LOSSY)
def test_a_lossy_codec_stays_within_its_error(codec: str, dtype: str, seed: int) -> None:
    kv = random_kv(seed, tokens=256, dim=64, dtype=dtype)

    loaded = round_trip(kv, codec)

    for layer in range(2):
        assert loaded.keys[layer].dtype == kv.keys[layer].dtype
        assert error(loaded.keys[layer], kv.keys[layer]) < LARGEST_ERROR[codec]
        assert error(loaded.values[layer], kv.values[layer]) < LARGEST_ERROR[codec]


@given(
    codec=st.sampled_from(LOSSY),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 70)),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, database=None)
def test_a_lossy_codec_takes_any_shape(codec: str, dtype: str, shape: tuple[int, int, int], seed: int) -> None:
    heads, tokens, dim = shape
    kv = random_kv(seed, layers=1, heads=heads, tokens=tokens, dim=dim, dtype=dtype)

    loaded = round_trip(kv, codec)

    for found, right in ((loaded.keys[0], kv.keys[0]), (loaded.values[0], kv.values[0])):
        assert found.shape == right.shape
        spread = float(right.float().max() - right.float().min())
        assert float((found.float() - right.float()).abs().max()) <= 0.05 * spread + 1e-2


@pytest.mark.parametrize("codec", LOSSY)
def test_large_channels_of_keys_do_not_drown_the_others(codec: str, seed: int) -> None:
    kv = random_kv(seed)
    keys = kv.keys[0].clone()
    keys[:, :, 3] = keys[:, :, 3] * 2 + 200

    loaded = round_trip(kv_of((keys, kv.values[0])), codec)

    others = [channel for channel in range(32) if channel != 3]
    assert error(loaded.keys[0][:, :, others], keys[:, :, others]) < LARGEST_ERROR[codec]
    assert error(loaded.keys[0][:, :, 3], keys[:, :, 3]) < LARGEST_ERROR[codec]


@pytest.mark.parametrize("constant", [0.0, -0.37, 1e-40, 3e4])
@pytest.mark.parametrize("codec", LOSSY)
def test_channels_and_tokens_without_any_range_come_back(codec: str, constant: float, seed: int) -> None:
    kv = random_kv(seed)
    keys, values = kv.keys[0].clone(), kv.values[0].clone()
    keys[:, :, 5] = constant
    values[:, 7] = constant
    whole = torch.full_like(keys, constant)

    loaded = round_trip(kv_of((keys, values), (whole, whole)), codec)

    rounding = 2**-4 if codec == "fp8" else 0.0  # half a step of three bits of mantissa, beside larger numbers
    for found in (loaded.keys[0][:, :, 5], loaded.values[0][:, 7], loaded.keys[1], loaded.values[1]):
        assert torch.allclose(found, torch.full_like(found, constant), rtol=rounding + 1e-4, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", LOSSY)
def test_the_largest_numbers_never_become_infinite(codec: str, dtype: str, seed: int) -> None:
    kv = random_kv(seed, layers=1, dtype=dtype)
    largest = torch.finfo(getattr(torch, dtype)).max / 2.5
    with torch.inference_mode():
        kv.keys[0][0, 3, 4], kv.keys[0][0, 9, 4], kv.values[0][1, 2, 3] = largest, -largest, largest

    loaded = round_trip(kv, codec)

    assert torch.isfinite(loaded.keys[0]).all()
    assert float(loaded.keys[0][0, 3, 4]) == pytest.approx(largest, rel=0.02)
    assert float(loaded.values[0][1, 2, 3]) == pytest.approx(largest, rel=0.02)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("codec", LOSSY)
def test_a_lossy_codec_refuses_numbers_that_are_none(codec: str, part: str, number: float, seed: int) -> None:
    kv = random_kv(seed)
    with torch.inference_mode():
        getattr(kv, part)[1][1, 33, 2] = number

    with pytest.raises(NonFiniteKV, match="PLATEMAKER_CODEC=none"):
        encode_chunk(kv, 0, 70, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_equal_kv_gives_equal_bytes(codec: str, seed: int) -> None:
    assert encode_chunk(random_kv(seed), 3, 40, codec) == encode_chunk(random_kv(seed), 3, 40, codec)


def test_the_sizes_are_what_each_codec_promises(seed: int) -> None:
    kv = random_kv(seed, layers=4, tokens=256, dim=64, dtype="bfloat16")

    sizes = {codec: len(encode_chunk(kv, 0, 256, codec)) for codec in CODECS}

    ratio = {codec: sizes["none"] / size for codec, size in sizes.items()}
    assert ratio["shuffle-zstd"] > 1.2
    assert 1.8 < ratio["int8"] < ratio["fp8"] < 2.01
    assert ratio["int4"] > 3


@pytest.mark.parametrize("codec", WITH_HEADER)
def test_a_chunk_says_what_it_is(codec: str, seed: int) -> None:
    data = encode_chunk(random_kv(seed, dtype="bfloat16"), 0, 70, codec)

    header = header_of(data)

    assert (header.codec, header.dtype) == (codec, "bfloat16")
    assert header.shapes == {f"{kind}.{layer}": (2, 70, 32) for layer in range(2) for kind in "kv"}
    assert all(name.rsplit(".", 1)[0] in header.shapes for name in load(data))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("asked", [*CODECS, "codec-of-tomorrow"])
def test_a_chunk_of_another_codec_is_refused(codec: str, asked: str, seed: int) -> None:
    data = encode_chunk(random_kv(seed), 0, 70, codec)
    if asked != codec:
        refuse(data, codec=asked, match=f"its codec is {codec}, not {asked}")


def test_a_codec_that_this_version_does_not_know_is_refused(seed: int) -> None:
    data = encode_chunk(random_kv(seed), 0, 70, "int8")
    unknown = header_of(data).model_copy(update={"codec": "int3"})

    refuse(rebuild(data, lambda _: None, unknown), codec="int3", match="int3 is no known codec")


@pytest.mark.parametrize("codec", CODECS)
def test_another_dtype_or_number_of_tokens_is_refused(codec: str, seed: int) -> None:
    data = encode_chunk(random_kv(seed, dtype="float16"), 0, 70, codec)

    refuse(data, codec=codec, dtype="bfloat16", match="float16, not bfloat16")
    refuse(data, codec=codec, dtype="float16", tokens=69, match="not 69 tokens")


@pytest.mark.parametrize("codec", [codec for codec in WITH_HEADER if codec != "fp8"])  # its parts are always the same
def test_a_header_that_lies_about_the_dtype_is_refused(codec: str, seed: int) -> None:
    data = encode_chunk(random_kv(seed, dtype="bfloat16"), 0, 70, codec)
    lie = header_of(data).model_copy(update={"dtype": "float32"})

    refuse(rebuild(data, lambda _: None, lie), codec=codec)


@pytest.mark.parametrize("shape", [(2, 70, 33), (1, 70, 32), (4, 70, 17), (2, 70, 1 << 40)])
@pytest.mark.parametrize("codec", WITH_HEADER)
def test_a_header_that_lies_about_a_shape_is_refused(codec: str, shape: tuple[int, ...], seed: int) -> None:
    data = encode_chunk(random_kv(seed), 0, 70, codec)
    header = header_of(data)
    lie = header.model_copy(update={"shapes": header.shapes | {"k.1": shape}})

    refuse(rebuild(data, lambda _: None, lie), codec=codec)


@pytest.mark.parametrize("codec", WITH_HEADER)
def test_other_heads_than_in_the_chunk_before_are_refused(codec: str, seed: int) -> None:
    kv = PrefixKV(140)
    first, second = random_kv(seed), random_kv(seed, heads=4, dim=16)
    decode_chunk(encode_chunk(first, 0, 70, codec), kv, 0, 70, codec=codec, dtype="float32", device="cpu")

    with pytest.raises(ChunkMismatch, match="the chunks before it"):
        decode_chunk(encode_chunk(second, 0, 70, codec), kv, 70, 140, codec=codec, dtype="float32", device="cpu")


@pytest.mark.parametrize("codec", WITH_HEADER)
def test_every_part_is_needed_and_no_other(codec: str, seed: int) -> None:
    data = encode_chunk(random_kv(seed), 0, 70, codec)
    for name, part in load(data).items():
        refuse(rebuild(data, lambda parts, name=name: parts.pop(name)), codec=codec)
        other = {name: part.view(torch.uint8)[..., :1].contiguous()}
        refuse(rebuild(data, lambda parts, other=other: parts.update(other)), codec=codec)
    refuse(rebuild(data, lambda parts: parts.update({"k.2.q": torch.zeros(1)})), codec=codec, match="no layer")


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_are_none_are_refused(codec: str, number: float, seed: int) -> None:
    data = encode_chunk(random_kv(seed), 0, 70, codec)

    refuse(rebuild(data, lambda parts: parts["v.1.scale"][0].fill_(number)), codec=codec, match="scale")


@pytest.mark.parametrize("codec", WITH_HEADER)
@pytest.mark.parametrize("left", [0, 7, 9, 300, -200, -1])
def test_a_truncated_chunk_is_refused(codec: str, left: int, seed: int) -> None:
    refuse(encode_chunk(random_kv(seed), 0, 70, codec)[:left], codec=codec)


@given(codec=st.sampled_from(WITH_HEADER), data=st.binary(max_size=200))
@settings(max_examples=30, deadline=None, database=None)
def test_random_bytes_are_refused(codec: str, data: bytes) -> None:
    refuse(data, codec=codec)


@given(codec=st.sampled_from(WITH_HEADER), data=st.data())
@settings(max_examples=100, deadline=None, database=None)
def test_a_damaged_chunk_is_refused_or_has_the_right_shape(codec: str, data: st.DataObject) -> None:
    chunk = bytearray(encode_chunk(random_kv(1, layers=1, heads=1, tokens=5, dim=4), 0, 5, codec))
    for _ in range(data.draw(st.integers(1, 3))):
        chunk[data.draw(st.integers(0, len(chunk) - 1))] = data.draw(st.integers(0, 255) | st.sampled_from(b'"[]{},01'))
    kv = PrefixKV(5)
    try:
        decode_chunk(bytes(chunk), kv, 0, 5, codec=codec, dtype="float32", device="cpu")
    except ChunkMismatch:
        assert kv.num_layers == 0
    else:
        assert kv.keys[0].shape[1] == 5


def bomb(claimed: tuple[int, int, int], frame: bytes) -> bytes:
    header = Header(codec="shuffle-zstd", dtype="float32", shapes={"k.0": claimed, "v.0": claimed})
    part = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    return bytes(save({"k.0.zstd": part, "v.0.zstd": part.clone()}, {OWN_KEY: header.model_dump_json()}))


@pytest.mark.parametrize(
    ("claimed", "match"),
    [((1, 4, 4), "unpacks to"), ((1, 4, 1 << 24), "more numbers a token"), ((1, 4, 1 << 20), "unpacks to")],
)
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(
    claimed: tuple[int, int, int], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert len(frame) < 10_000
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)

    refuse(bomb(claimed, frame), codec="shuffle-zstd", tokens=4, match=match)


@pytest.mark.parametrize("damage", ["no size", "extra bytes", "cut off", "no frame", "false size"])
def test_a_frame_that_is_not_exactly_the_tensor_is_refused(damage: str) -> None:
    whole = zstandard.ZstdCompressor().compress(bytes(range(64)))
    false = bytearray(whole)
    false[5] = 128  # single-segment frames keep a size below 256 there
    frame = {
        "no size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64)),
        "extra bytes": whole + b"\0",
        "cut off": whole[:-3],
        "no frame": bytes(64),
        "false size": bytes(false),
    }[damage]

    refuse(bomb((1, 4, 8 if damage == "false size" else 4), frame), codec="shuffle-zstd", tokens=4, match="zstd")
