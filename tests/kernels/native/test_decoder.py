"""Whole decode steps in native code, against ordinary steps and against float64."""

import copy
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from kernels import fused
from kernels.decode import Decoder, DecodeRequest
from kernels.fused import pick_decoder
from kernels.kv import Arrivals, PrefixKV
from kernels.model import Asked, LanguageModel, prepare_model
from kernels.native.backend import load_library
from kernels.native.decoder import NativeDecoder
from kernels.native.linear import MOST_ROWS
from kernels.params import GenerationParams
from kernels.prefill import prefill
from tests.kernels.families import CONTEXT, GROUPED, MORE_FAMILIES, SUPPORTED_FAMILIES, WINDOW

CPU = torch.device("cpu")
ODD = GROUPED | {"hidden_size": 60, "intermediate_size": 50, "num_attention_heads": 6}  # no multiple of a vector
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**ODD, head_dim=10, mlp_bias=True, attention_bias=True),
    "mistral": MistralConfig(**GROUPED, sliding_window=WINDOW),
    "qwen2": Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]
    ),
    "qwen3": Qwen3Config(**GROUPED, head_dim=24),
}
LIKE_LLAMA = {"llama", "llama-multi-query", "llama-3-rope", "qwen2", "qwen2-yarn", "qwen3", "mistral"}
TOLERANCE = 1e-4  # relative, in float32
Build = Callable[[PreTrainedConfig], PreTrainedModel]

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, build_model: Build) -> LanguageModel:
    return prepare_model(build_model(copy.deepcopy(FAMILIES[request.param])), CPU, CONTEXT)


def read(model: LanguageModel, draw: random.Random, tokens: int) -> tuple[list[int], PrefixKV]:
    ids = draw.choices(range(3, 128), k=tokens)
    return ids, prefill(model, ids, stops=[*range(64, tokens, 64), tokens]).kv


def two_steps(model: LanguageModel, documents: list[PrefixKV], pending: list[list[list[list[int]]]]) -> list[Tensor]:
    """All logits of the pending tokens [step][document][slot] in steps one after the other, and what is stored then."""
    suffixes = [model.new_suffix(len(slots), 40) for slots in pending[0]]
    stored = [[0] * len(slots) for slots in pending[0]]
    made = []
    for step in pending:
        asked = [Asked(*each) for each in zip(documents, suffixes, step, stored, strict=True)]
        made.append(model.ask_all(asked, every=True))
        stored = [[a + len(b) for a, b in zip(*each, strict=True)] for each in zip(stored, step, strict=True)]
    return made + [kept for suffix in suffixes for part in (suffix.keys, suffix.values) for kept in part.values()]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("case", range(3))
def test_a_step_is_the_ordinary_one_whatever_documents_and_counts(case: int, model: LanguageModel, seed: int) -> None:
    draw = random.Random(f"{seed} {case}")
    lengths = [(1, 300), (2, 39, 41), (120,)][case]
    documents = [read(model, draw, length)[1] for length in lengths]
    slots = [draw.randint(1, 5) for _ in documents]
    pending = [
        [[draw.choices(range(3, 128), k=draw.randint(1, most)) for _ in range(count)] for count in slots]
        for most in (8, 1, 3)
    ]
    assert model.decoder is not None

    found, expected = (two_steps(each, documents, pending) for each in (model, replace(model, decoder=None)))

    assert [len(logits) for logits in found[:3]] == [
        sum(len(slot) for slots in step for slot in slots) for step in pending
    ]
    assert max(map(relative, found, expected)) <= TOLERANCE


def test_keys_and_values_are_found_again_where_they_were_moved_to(model: LanguageModel, seed: int) -> None:
    _, kv = read(model, random.Random(seed), 90)
    found = []
    for each in (model, replace(model, decoder=None)):
        suffix = each.new_suffix(2, 4)
        each.ask(kv, suffix, [[5, 6], [7]], [0, 0])
        suffix.grow(5, 40)
        old, windows = kv.state(), [window.keys for window in kv.windows.values()]
        kv.set_state(kv.length, old)
        with torch.inference_mode():
            for keys in windows:
                keys.fill_(float("nan"))
        found.append(each.ask(kv, suffix, [[8] * 9, [9], [3]], [2, 1, 0]))

    assert relative(*found) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pending_token_is_a_run_over_everything_in_float64(family: str, build_model: Build, seed: int) -> None:
    draw = random.Random(seed)
    model = prepare_model(build_model(copy.deepcopy(FAMILIES[family])), CPU, CONTEXT)
    whole = build_model(copy.deepcopy(FAMILIES[family])).double()
    whole.set_attn_implementation("eager")
    ids, kv = read(model, draw, 90)
    slots = [draw.choices(range(3, 128), k=count) for count in (1, 30, 7)]
    with torch.inference_mode():
        runs = [whole(input_ids=torch.tensor([ids + slot]), use_cache=False).logits[0] for slot in slots]
    expected = torch.cat([run[len(ids) :] for run in runs])

    for each in (model, replace(model, decoder=None)):
        asked = Asked(kv, each.new_suffix(3, 30), slots, [0, 0, 0])
        assert relative(each.ask_all([asked], every=True), expected) <= TOLERANCE
        assert relative(each.ask_all([asked]), expected[[0, 30, 37]]) <= TOLERANCE


def test_company_changes_no_logit_by_more_than_rounding(model: LanguageModel, seed: int) -> None:
    draw = random.Random(seed)
    documents = [read(model, draw, length)[1] for length in (50, 130, 20)]
    questions = [draw.choices(range(3, 128), k=draw.randint(1, 9)) for _ in range(12)]
    alone = torch.cat([model.ask(documents[i // 4], model.new_suffix(1, 9), [q], [0]) for i, q in enumerate(questions)])

    asked = [
        Asked(document, model.new_suffix(4, 9), questions[4 * i : 4 * i + 4], [0] * 4)
        for i, document in enumerate(documents)
    ]

    assert relative(model.ask_all(asked), alone) <= TOLERANCE


def test_nan_stays_in_its_slot_and_goes_when_the_slot_is_cleared(build_model: Build, seed: int) -> None:
    model = prepare_model(build_model(copy.deepcopy(FAMILIES["mistral"])), CPU, CONTEXT)
    _, kv = read(model, random.Random(seed), 30)
    suffix = model.new_suffix(3, 4)
    expected = model.ask(kv, suffix, [[5], [6], [7]], [0, 0, 0])
    with torch.no_grad():
        model.hf.model.embed_tokens.weight[9] = float("nan")

    broken = model.ask(kv, suffix, [[5], [9], [7]], [0, 0, 0])
    suffix.clear(1)
    healed = model.ask(kv, suffix, [[5], [6], [7]], [0, 0, 0])

    assert broken.isnan().all(1).tolist() == [False, True, False]
    assert relative(broken[[0, 2]], expected[[0, 2]]) <= TOLERANCE
    assert relative(healed, expected) <= TOLERANCE


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each native step."""
    honest, made = NativeDecoder.logits, []

    def watched(self: NativeDecoder, parts: Any, ids: Tensor, *rest: Any) -> Tensor:
        made.append(len(ids))
        return honest(self, parts, ids, *rest)

    monkeypatch.setattr(NativeDecoder, "logits", watched)
    return made


def test_answers_come_from_native_steps(model: LanguageModel, seed: int, calls: list[int]) -> None:
    draw = random.Random(seed)
    _, kv = read(model, draw, 60)
    calls.clear()

    class NoText:
        stop_ids: frozenset[int] = frozenset()

        def text(self, ids: list[int]) -> str:
            return ""

    def answers(model: LanguageModel) -> dict[int, tuple[int, ...]]:
        params = GenerationParams(max_new_tokens=6, ignore_eos=True)
        asked = [DecodeRequest(key, draw.choices(range(3, 128), k=key + 1), params, kv) for key in range(5)]
        return {each.key: each.token_ids for each in Decoder(model, NoText(), max_batch=3).run(asked)}  # type: ignore[arg-type]

    assert len(answers(model)) == 5
    assert len(calls) == 12  # five answers of six tokens in three slots
    answers(replace(model, decoder=None))
    assert len(calls) == 12


def test_long_steps_and_documents_under_way_are_left_to_ordinary_steps(
    model: LanguageModel, seed: int, calls: list[int]
) -> None:
    _, kv = read(model, random.Random(seed), 30)
    calls.clear()

    model.ask(kv, model.new_suffix(1, 200), [[5] * (MOST_ROWS + 1)], [0])
    layers = list(kv.keys or kv.windows)
    kv.arrivals = Arrivals(layers, 1)
    kv.arrivals.note(layers[:-1])
    part = type("Part", (), {"prefix": kv, "seen": type("Rows", (), {"slots": [0]})})()
    assert model.decoder is not None
    assert not model.decoder.takes([part])
    kv.arrivals.note(layers[-1:])
    assert model.decoder.takes([part])
    assert calls == []
    model.ask(kv, model.new_suffix(1, 200), [[5] * MOST_ROWS], [0])
    assert calls == [MOST_ROWS]


@pytest.mark.parametrize("name", [*SUPPORTED_FAMILIES, "smollm3", "ernie-4.5", "starcoder2", "stablelm"])
def test_only_what_is_like_llama_is_taken(name: str, build_model: Build) -> None:
    config = copy.deepcopy((SUPPORTED_FAMILIES | MORE_FAMILIES)[name])

    model = prepare_model(build_model(config), CPU, CONTEXT)

    assert (model.decoder is not None) == (name in LIKE_LLAMA | {"smollm3"})


@pytest.mark.parametrize("fault", ["wrong", "nan", "failing"])
def test_a_decoder_that_fails_the_comparison_is_not_used(
    fault: str, model: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = NativeDecoder.logits

    def tampered(self: NativeDecoder, *given: Any) -> Tensor:
        if fault == "failing":
            raise MemoryError("no memory")
        return honest(self, *given) * (1.001 if fault == "wrong" else float("nan"))

    monkeypatch.setattr(NativeDecoder, "logits", tampered)

    with caplog.at_level(logging.INFO, "kernels.fused"):
        assert pick_decoder(model.hf) is None
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("family", "part"),
    [
        *((family, part) for family in FAMILIES for part in ("rotation", "scale", "norm", "order")),
        *((family, "window") for family in ("mistral", "qwen2")),
        *((family, "bias") for family in ("llama", "qwen2")),
        ("qwen3", "head norm"),
    ],
)
def test_the_comparison_notices_what_is_left_out(
    family: str, part: str, build_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare_model(build_model(copy.deepcopy(FAMILIES[family])), CPU, CONTEXT)
    decoder = NativeDecoder(model.hf, load_library())
    assert fused.largest_error(decoder, model.hf) <= fused.TOLERANCE[torch.float32]
    for weights in decoder.weights:
        if part == "rotation":
            weights.rotated = 0
        elif part == "norm":
            weights.mlp_eps += 0.01
        elif part == "bias":
            weights.v_bias = None
        elif part == "head norm":
            weights.k_norm = None
    if part == "scale":
        decoder.layers = [(layer, scale * 1.01) for layer, scale in decoder.layers]
    if part == "window":
        honest = NativeDecoder.logits
        monkeypatch.setattr(NativeDecoder, "logits", lambda self, *given: honest(self, *given[:-1], {}))
    if part == "order":
        decoder.layers = decoder.layers[::-1]

    assert not fused.largest_error(decoder, model.hf) <= fused.TOLERANCE[torch.float32]


def test_without_a_compiler_or_in_bfloat16_steps_are_ordinary(
    build_model: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    config = copy.deepcopy(FAMILIES["qwen3"])
    half = prepare_model(build_model(config).bfloat16(), CPU, CONTEXT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    plain = prepare_model(build_model(config), CPU, CONTEXT)

    for model in (half, plain):
        assert model.decoder is None
        _, kv = read(model, random.Random(seed), 20)
        assert model.ask(kv, model.new_suffix(1, 3), [[4, 5, 6]], [0]).isfinite().all()


def test_a_hook_in_the_model_is_not_passed_over(build_model: Build) -> None:
    hf = prepare_model(build_model(copy.deepcopy(FAMILIES["llama"])), CPU, CONTEXT).hf
    hf.model.layers[1].mlp.register_forward_hook(lambda *_: None)

    assert pick_decoder(hf) is None


def test_more_tokens_than_there_is_room_for_are_never_written(model: LanguageModel, seed: int) -> None:
    _, kv = read(model, random.Random(seed), 20)
    suffix = model.new_suffix(2, 4)
    for pending, lengths in (([[5] * 5], [0]), ([[5]], [4]), ([[5]] * 3, [0] * 3)):
        with pytest.raises(AssertionError, match="no room"):
            model.ask(kv, suffix, pending, lengths)
