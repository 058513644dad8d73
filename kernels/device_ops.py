"""What the engine asks of a device, op by op: on random numbers, beside what float64 on the CPU says of them."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from kernels.backend import TOLERANCE, AttentionBackend, made_for
from kernels.codecs import CODECS, decode_chunk, encode_chunk
from kernels.device_case import CHUNK, DOCUMENT, EVERYTHING, KV_HEADS, SEED, AttentionCase, random_tensor
from kernels.flash import DEVICES, HALVES
from kernels.kv import PrefixKV
from kernels.model import SPLIT_TOLERANCE, LanguageModel, prepare_model
from kernels.native import linear
from kernels.native.backend import load_library
from kernels.native.build import BuildFailed
from kernels.params import GenerationParams
from kernels.prefill import prefill
from kernels.sampling import Drawn, Sampler, draw
from kernels.torch_backend import TorchBackend

ROWS_OF_STEPS = (1, 5, 32, 128)
# Relative, l2, of normally distributed numbers.
CODEC_TOLERANCE = {"none": 0.0, "shuffle-zstd": 0.0, "int8": 0.01, "fp8": 0.05, "int4": 0.15}
LINEAR_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative, l2


class Missing(Exception):
    """This device has no such thing, and the engine does without it."""


class Trial(NamedTuple):
    """`run` is what is timed; `measure` compares its results, as they lie on the device, with float64."""

    run: Callable[[], Sequence[Tensor]]
    measure: Callable[[Sequence[Tensor]], float]


class Op(NamedTuple):
    """`prepare` makes the trial; it raises Missing where there is nothing to try."""

    name: str
    implementation: str
    tolerance: float
    prepare: Callable[[], Trial]


def ops_of(device: torch.device, dtype: torch.dtype) -> Iterator[Op]:
    """Everything the engine computes on this device in this dtype, each with all implementations it may choose."""
    tolerance = TOLERANCE[dtype]
    for name, make in _backends(device, dtype).items():
        for what, prepare in ATTENTION.items():
            yield Op(what, name, tolerance, partial(prepare, make, device, dtype))
    if dtype in HALVES and device.type in DEVICES:
        yield Op("prefill with log-sum-exp", "flash", tolerance, partial(_flash, device, dtype))
    if device.type == "cpu":
        yield Op("linear, few rows", "native", LINEAR_TOLERANCE[dtype], partial(_linear, device, dtype, True))
    yield Op("linear, few rows", "torch", LINEAR_TOLERANCE[dtype], partial(_linear, device, dtype, False))
    yield Op("model: norm, rotary, steps", "engine", SPLIT_TOLERANCE[dtype], partial(_model, device, dtype))
    for codec in CODECS:
        yield Op(f"codec {codec}", "torch", CODEC_TOLERANCE[codec], partial(_codec, codec, device, dtype))
    yield Op("to the device and back", "torch", 0.0, partial(_copy, device, dtype, False))
    if device.type != "cpu":
        yield Op("the same, pinned", "torch", 0.0, partial(_copy, device, dtype, True))


def sampling_op(device: torch.device) -> Op:
    """Draws from logits, which are float32 whatever the model is."""
    return Op("sampling", "torch", 0.0, partial(_sampling, device))


def _backends(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], AttentionBackend]]:
    made = made_for(device, dtype)
    return {"torch": TorchBackend} | ({made[0].split()[0].lower(): made[1]} if made else {})


def _largest_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Of any number; NaN where one is."""
    errors = [(a.cpu().double() - b).abs().max() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())


def _largest_relative(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The l2 norm of a difference over that of what is right."""
    errors = [(a.cpu().double() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())


Make = Callable[[], AttentionBackend]


def _attention(
    does: Sequence[str],
    make: Make,
    device: torch.device,
    dtype: torch.dtype,
    *,
    dims: Sequence[tuple[int, int]] = ((64, 64), (128, 128)),
    window: int = EVERYTHING,
    softcap: float | None = None,
    sinks: bool = False,
) -> Trial:
    try:
        backend = make()
    except (BuildFailed, ImportError, OSError) as exc:
        raise Missing(f"attention runs in plain torch: {str(exc).splitlines()[0]}") from exc
    cases = [AttentionCase(device, dtype, dim, v, window=window, softcap=softcap, sinks=sinks) for dim, v in dims]
    return Trial(
        lambda: [found for case in cases for do in does for found in getattr(case, do)(backend)],
        lambda found: _largest_difference(
            [right for case in cases for do in does for right in getattr(case, f"exact_{do}")()], found
        ),
    )


ATTENTION: dict[str, Callable[[Make, torch.device, torch.dtype], Trial]] = {
    "shared prefix": partial(_attention, ["shared"]),
    "own tokens, merged": partial(_attention, ["answer"]),
    "prefill": partial(_attention, ["read"]),
    "sliding window": partial(_attention, ["answer", "read"], window=30),
    "softcap": partial(_attention, ["answer", "read"], softcap=5.0),
    "sinks": partial(_attention, ["answer"], sinks=True),
    "latent attention": partial(_attention, ["answer", "read"], dims=[(96, 64)]),
}


def _flash(device: torch.device, dtype: torch.dtype) -> Trial:
    """The device's own operator, both ways in which prefill calls it."""
    flash, dim = DEVICES[device.type].flash, 128
    case = AttentionCase(device, dtype, dim, dim)
    past = DOCUMENT - CHUNK

    def run() -> Sequence[Tensor]:
        q, k, v = case.chunk[None], case.k[None], case.v[None]
        made = []
        for keys, causal in ((slice(past, DOCUMENT), True), (slice(0, past), False)):
            out, lse = flash(q, k[:, :, keys], v[:, :, keys], causal=causal, scale=case.scale)
            made += [out[0].transpose(0, 1), lse[0]]
        return made

    def measure(found: Sequence[Tensor]) -> float:
        own, whole = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril(), torch.ones(CHUNK, past, dtype=torch.bool)
        expected = [*case.exact(case.chunk, case.k[:, past:], case.v[:, past:], own)]
        expected += case.exact(case.chunk, case.k[:, :past], case.v[:, :past], whole)
        return _largest_difference(expected, found)

    try:
        run()
    except (NotImplementedError, AttributeError) as exc:
        raise Missing(f"prefill does without it: {str(exc).splitlines()[0]}") from exc
    return Trial(run, measure)


def _linear(device: torch.device, dtype: torch.dtype, native: bool) -> Trial:
    layer = nn.Linear(576, 200, device=device, dtype=dtype)
    given = [random_tensor(rows, 576, seed=rows).to(device, dtype) for rows in ROWS_OF_STEPS]
    weight, bias = layer.weight.detach().cpu().double(), layer.bias.detach().cpu().double()
    expected = [nn.functional.linear(x.cpu().double(), weight, bias) for x in given]
    if native:
        try:
            linear.quicken(layer, load_library())
        except (BuildFailed, OSError) as exc:
            raise Missing(f"linear layers run in plain torch: {str(exc).splitlines()[0]}") from exc
        if type(layer) is nn.Linear:
            raise Missing("torch's own product is used for this type")
    return Trial(lambda: [layer(x) for x in given], partial(_largest_relative, expected))


def _model(device: torch.device, dtype: torch.dtype) -> Trial:
    """A small random Llama: embedding, RMS norm, rotary embedding, projections, SwiGLU, head."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.15,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    whole = copy.deepcopy(hf).double()
    whole.set_attn_implementation("eager")
    ids: list[int] = torch.randint(3, 128, (200,), generator=torch.Generator().manual_seed(SEED)).tolist()
    document, questions = ids[:170], [ids[170:190], ids[190:193], ids[193:]]
    with torch.inference_mode():
        texts = [torch.tensor([document + question]) for question in questions]
        expected = [whole(input_ids=text, use_cache=False).logits[0, -1] for text in texts]
    model = prepare_model(hf, device, 512)

    def run() -> Sequence[Tensor]:
        return _ask(model, document, questions)

    return Trial(run, partial(_largest_relative, [torch.stack(expected)]))


def _ask(model: LanguageModel, document: list[int], questions: list[list[int]]) -> Sequence[Tensor]:
    kv = prefill(model, document, stops=[64, 128, len(document)]).kv
    suffix = model.new_suffix(len(questions), max(map(len, questions)))
    model.ask(kv, suffix, [question[:-1] for question in questions], [0] * len(questions))
    return [model.ask(kv, suffix, [question[-1:] for question in questions], [len(q) - 1 for q in questions])]


def _codec(codec: str, device: torch.device, dtype: torch.dtype) -> Trial:
    kv = PrefixKV(150)
    for layer in range(2):
        k, v = (random_tensor(KV_HEADS, kv.capacity, 64, seed=layer * 2 + part).to(device, dtype) for part in range(2))
        kv.write(layer, 0, k, v)
    kv.length = kv.capacity
    name = str(dtype).removeprefix("torch.")

    def run() -> Sequence[Tensor]:
        loaded = PrefixKV(kv.capacity)
        data = encode_chunk(kv, 0, kv.length, codec)
        decode_chunk(data, loaded, 0, kv.length, codec=codec, dtype=name, device=str(device))
        return [part[layer] for part in (loaded.keys, loaded.values) for layer in range(2)]

    expected = [part[layer].cpu().double() for part in (kv.keys, kv.values) for layer in range(2)]
    return Trial(run, partial(_largest_relative, expected))


def _copy(device: torch.device, dtype: torch.dtype, pinned: bool) -> Trial:
    """Exact, also as a view, and without waiting where the memory is pinned."""
    numbers = random_tensor(3, 1000, 64, seed=1).to(dtype)
    given = numbers.pin_memory() if pinned else numbers

    def run() -> Sequence[Tensor]:
        there = given.to(device, non_blocking=pinned)
        there[:, 1:] = there[:, :-1].clone()
        return [there.cpu()]

    expected = torch.cat([numbers[:, :1], numbers[:, :-1]], 1).double()
    return Trial(run, partial(_largest_difference, [expected]))


def _sampling(device: torch.device) -> Trial:
    """Greedy, and drawn with a seed: the same tokens as from the same logits on the CPU."""
    logits = random_tensor(16, 5000, seed=1) * 4
    ways = (GenerationParams(), GenerationParams(temperature=0.8, top_p=0.9, top_k=50, seed=7))

    def drawn(at: torch.device) -> Tensor:
        rows = [draw(logits.to(at), [Sampler(how, [row]) for row in range(len(logits))]) for how in ways]
        return torch.tensor([[choice.token if isinstance(choice, Drawn) else -1 for choice in row] for row in rows])

    expected = torch.stack([logits.double().argmax(-1), drawn(torch.device("cpu"))[1]]).double()
    return Trial(lambda: [drawn(device)], partial(_largest_difference, [expected]))
