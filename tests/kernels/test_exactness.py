"""Tiny random models of every attention family: reading the document apart from the questions changes nothing.

The reference is transformers' own eager attention, run over prefix and question (and answer) at once, without a cache.
"""

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3nTextConfig,
    Llama4TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from kernels import steps
from kernels.architecture import check_architecture, read_config
from kernels.decode import Decoder, DecodeRequest
from kernels.errors import ModelUnsupported
from kernels.kv import PrefixKV, SuffixKV
from kernels.model import LanguageModel, check_split, load_model, prepare_model
from kernels.params import GenerationParams
from kernels.prefill import chunk_stops, prefill
from kernels.recurrent import RecurrentState
from kernels.settings import KernelSettings
from kernels.steps import DecodeStep
from tests.kernels.families import (
    CONTEXT,
    GROUPED,
    MORE_FAMILIES,
    RECURRENT_FAMILIES,
    REFUSED_FAMILIES,
    SUPPORTED_FAMILIES,
    WINDOW_FAMILIES,
)
from tests.kernels.store import Stored

CPU = torch.device("cpu")
TOLERANCE = 1e-3  # of a logit, in float32
ANSWER_LEN = 32
CHUNKS = (16, 64, 151)
AWKWARD = ((1, 38, 39, 41, 80, 120), (79,), (3, 5, 119))  # around the window's width, and very short


@dataclass
class Case:
    """One architecture with a document, five ragged questions and what the reference says of them."""

    name: str
    model: LanguageModel
    whole: PreTrainedModel
    prefix: list[int]
    questions: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    first_logits: list[Tensor] = field(default_factory=list)

    def reference_logits(self, ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.whole(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        return logits.float()

    def add_question(self, question: list[int]) -> None:
        """Answers it greedily, recomputing everything for each token.

        A question on whose way two tokens are as good as equal is left out: float32 cannot tell which is better.
        """
        ids = self.prefix + question
        logits = []
        for _ in range(ANSWER_LEN):
            logits.append(self.reference_logits(ids))
            best = logits[-1].topk(2).values
            if best[0] - best[1] < TOLERANCE:
                return
            ids = [*ids, int(logits[-1].argmax())]
        self.questions.append(question)
        self.answers.append(ids[-ANSWER_LEN:])
        self.first_logits.append(logits[0])

    def read(self, chunk_tokens: int) -> PrefixKV:
        return prefill(self.model, self.prefix, stops=chunk_stops(len(self.prefix), 0, chunk_tokens)).kv

    def error_of_first_logits(self, kv: PrefixKV) -> float:
        suffix = self.model.new_suffix(len(self.questions), max(map(len, self.questions)))
        logits = self.model.ask(kv, suffix, self.questions, [0] * len(self.questions))
        return float((logits - torch.stack(self.first_logits)).abs().max())

    def answer(
        self, kv: PrefixKV, keys: Iterable[int], *, lengths: tuple[int, ...] = (ANSWER_LEN,) * 5, max_batch: int = 8
    ) -> dict[int, list[int]]:
        requests = [
            DecodeRequest(key, self.questions[key], GenerationParams(max_new_tokens=lengths[key], ignore_eos=True), kv)
            for key in keys
        ]
        decoder = Decoder(self.model, NoText(), max_batch=max_batch)  # type: ignore[arg-type]
        return {result.key: list(result.token_ids) for result in decoder.run(requests)}


class NoText:
    """In the place of a Prompter: these models have no words."""

    stop_ids: frozenset[int] = frozenset()

    def text(self, ids: list[int]) -> str:
        return ""


@pytest.fixture(scope="module", params=SUPPORTED_FAMILIES)
def case(request: pytest.FixtureRequest, build_model: Callable[[PreTrainedConfig], PreTrainedModel], seed: int) -> Case:
    config = copy.deepcopy(SUPPORTED_FAMILIES[request.param])
    model = build_model(config)
    whole = copy.deepcopy(model)
    whole.set_attn_implementation("eager")
    draw = random.Random(f"{seed} {request.param}")
    vocab = range(3, config.vocab_size)
    case = Case(request.param, prepare_model(model, CPU, CONTEXT), whole, draw.choices(vocab, k=draw.randint(140, 150)))
    while len(case.questions) < 5:
        case.add_question(draw.choices(vocab, k=draw.randint(1, 30)))
    return case


def test_the_model_is_accepted(case: Case) -> None:
    check_architecture(case.name, case.model.hf.config.to_dict())
    check_split(case.name, case.model)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_the_first_logits_equal_one_run_over_everything(case: Case, chunk_tokens: int) -> None:
    error = case.error_of_first_logits(case.read(chunk_tokens))

    print(f"{case.name}: largest error of a logit {error:.1e}")  # noqa: T201 # shown by pytest -rP
    assert error <= TOLERANCE


def test_the_probe_is_the_best_after_the_last_token_was_asked_again(case: Case) -> None:
    expected = case.reference_logits([*case.prefix, case.prefix[-1]])

    probe = prefill(case.model, case.prefix, stops=chunk_stops(len(case.prefix), 0, 64)).probe

    for token, logit in zip(probe.token_ids, probe.logits, strict=True):
        assert abs(float(expected[token]) - logit) <= TOLERANCE
    assert abs(float(expected.max()) - probe.logits[0]) <= TOLERANCE


def test_greedy_answers_equal_a_loop_that_recomputes_everything(case: Case) -> None:
    assert case.answer(case.read(16), range(5)) == dict(enumerate(case.answers))


def test_an_answer_is_the_same_alone_and_in_reversed_order(case: Case) -> None:
    kv = case.read(CHUNKS[-1])

    assert case.answer(kv, [3]) == {3: case.answers[3]}
    lengths = (32, 9, 20, 32, 15)  # one goes and the next comes while others are under way
    expected = {key: answer[: lengths[key]] for key, answer in enumerate(case.answers)}
    assert case.answer(kv, reversed(range(5)), lengths=lengths, max_batch=3) == expected


def test_an_answer_is_the_same_beside_questions_of_another_document(case: Case) -> None:
    kv = case.read(CHUNKS[-1])
    other = prefill(case.model, case.prefix[::-1], stops=chunk_stops(len(case.prefix), 0, 64)).kv
    params = GenerationParams(max_new_tokens=9, ignore_eos=True)
    requests = [DecodeRequest(key, case.questions[key // 2], params, (kv, other)[key % 2]) for key in range(10)]

    decoder = Decoder(case.model, NoText(), max_batch=4)  # type: ignore[arg-type]
    found = {result.key: list(result.token_ids) for result in decoder.run(requests)}

    assert [found[key] for key in range(0, 10, 2)] == [answer[:9] for answer in case.answers]
    alone = case.answer(other, range(5), lengths=(9,) * 5, max_batch=1)
    assert [found[key] for key in range(1, 10, 2)] == list(alone.values())


@pytest.mark.parametrize("stops", AWKWARD, ids=str)
def test_an_answer_is_the_same_from_stored_chunks_and_state(case: Case, stops: tuple[int, ...]) -> None:
    stored = Stored(case.model, case.prefix)
    stored.read([*stops, len(case.prefix)])

    loaded = stored.load(len(case.prefix))

    assert case.error_of_first_logits(loaded) <= TOLERANCE
    lengths = (32, 9, 20, 32, 15)  # slots move while others are under way
    expected = {key: answer[: lengths[key]] for key, answer in enumerate(case.answers)}
    assert case.answer(loaded, range(5), lengths=lengths, max_batch=4) == expected


def test_prefill_goes_on_at_each_chunk_end(case: Case) -> None:
    stored = Stored(case.model, case.prefix)
    stops = [*AWKWARD[0], len(case.prefix)]
    stored.read(stops)

    for stop in stops[:-1]:
        result = prefill(case.model, case.prefix, stops=stops, kv=stored.load(stop))

        assert result.computed_tokens == len(case.prefix) - stop
        assert case.error_of_first_logits(result.kv) <= TOLERANCE


def test_document_and_window_matter_to_the_reference(case: Case) -> None:
    """Otherwise the tests above would prove little."""
    ids = case.prefix + case.questions[0]
    gap = case.prefix[:-20] + case.prefix[-10:] + case.questions[0]
    assert (case.reference_logits(gap) - case.first_logits[0]).abs().max() > 20 * TOLERANCE

    if case.name in WINDOW_FAMILIES:
        wide = copy.deepcopy(case.whole)
        wide.config.sliding_window = 400
        with torch.inference_mode():
            other = wide(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        assert (other - case.first_logits[0]).abs().max() > 20 * TOLERANCE


REFUSED_BY_CONFIG: dict[str, tuple[PreTrainedConfig, str]] = {
    "dynamic NTK": (
        LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "dynamic NTK",
    ),
    "LongRoPE": (
        Phi3Config(
            **GROUPED,
            original_max_position_embeddings=256,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 256,
            },
        ),
        "LongRoPE",
    ),
    "chunked attention": (Llama4TextConfig(**GROUPED, attention_chunk_size=16), "chunked"),
    "chunked attention without layer types": (
        LlamaConfig(**GROUPED, attention_chunk_size=16),
        "chunked local attention",
    ),
    "shared KV": (Gemma3nTextConfig(**GROUPED, num_kv_shared_layers=2), "share one KV cache"),
}


@pytest.mark.parametrize("kind", REFUSED_BY_CONFIG)
def test_what_cannot_be_split_is_refused_by_its_config_alone(kind: str, tmp_path: Path) -> None:
    config, reason = REFUSED_BY_CONFIG[kind]
    config.save_pretrained(tmp_path)

    with pytest.raises(ModelUnsupported, match=reason) as caught:
        check_architecture("strange-model", read_config(tmp_path))

    assert caught.value.name == "strange-model"
    with pytest.raises(ModelUnsupported, match=reason):  # before any weight is looked for
        load_model(tmp_path, KernelSettings(device="cpu", dtype="float32"))


def test_rope_of_one_layer_kind_is_looked_at_too() -> None:
    rope = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ModelUnsupported, match="dynamic NTK"):
        check_architecture("strange-model", {"rope_parameters": rope})


def test_the_older_names_of_rope_are_looked_at_too() -> None:
    with pytest.raises(ModelUnsupported, match="dynamic NTK"):
        check_architecture("old-model", {"rope_scaling": {"type": "dynamic", "factor": 2.0}})


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(ModelUnsupported, match="encoder-decoder"):
        check_architecture("translator", {"is_encoder_decoder": True})


@pytest.mark.parametrize("kind", REFUSED_FAMILIES)
def test_what_cannot_be_split_is_refused(kind: str, build_model: Callable[[PreTrainedConfig], PreTrainedModel]) -> None:
    config = copy.deepcopy(REFUSED_FAMILIES[kind])

    with pytest.raises(ModelUnsupported) as caught:
        check_architecture("strange-model", config.to_dict())
        check_split("strange-model", prepare_model(build_model(config), CPU, CONTEXT))

    assert caught.value.reason


@pytest.mark.parametrize("kind", MORE_FAMILIES)
def test_more_families_are_accepted(kind: str, build_model: Callable[[PreTrainedConfig], PreTrainedModel]) -> None:
    config = copy.deepcopy(MORE_FAMILIES[kind])

    check_architecture(kind, config.to_dict())
    check_split(kind, prepare_model(build_model(config), CPU, CONTEXT))


@pytest.mark.parametrize("lost", ["window", "softcap", "scale", "prefix"])
def test_the_trial_notices_an_attention_that_does_not_do_what_it_should(
    lost: str, build_model: Callable[[PreTrainedConfig], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare_model(build_model(copy.deepcopy(SUPPORTED_FAMILIES["gemma2"])), CPU, CONTEXT)
    check_split("gemma2", model)
    honest = DecodeStep.attend

    def tampered(self: DecodeStep, layer: int, q: Tensor, **how: Any) -> Any:
        if lost == "prefix":
            self.prefix = replace(self.prefix, length=15)
        elif lost == "window":
            how["window"] = steps.EVERYTHING
        elif lost == "softcap":
            how["softcap"] = None
        else:
            how["scale"] *= 1.02
        return honest(self, layer, q, **how)

    monkeypatch.setattr(DecodeStep, "attend", tampered)

    with pytest.raises(ModelUnsupported, match="differs from its whole run"):
        check_split("gemma2", model)
    assert model.hf.config._attn_implementation == steps.ATTENTION_NAME


@pytest.mark.parametrize("family", ["qwen3-next", "lfm2", "falcon-h1", "mamba2"])
@pytest.mark.parametrize("lost", ["stored state", "rows of their own", "own copy"])
def test_the_trial_notices_a_state_that_is_not_kept(
    family: str,
    lost: str,
    build_model: Callable[[PreTrainedConfig], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = prepare_model(build_model(copy.deepcopy(RECURRENT_FAMILIES[family])), CPU, CONTEXT)
    if lost == "stored state":
        honest = PrefixKV.state

        def emptied(self: PrefixKV) -> dict[str, Tensor]:
            return {name: torch.zeros_like(tensor) for name, tensor in honest(self).items()}

        monkeypatch.setattr(PrefixKV, "state", emptied)
    elif lost == "rows of their own":
        monkeypatch.setattr(RecurrentState, "rows", lambda self, first, stop: RecurrentState(dict(self.tensors)))
    else:
        monkeypatch.setattr(SuffixKV, "begin", lambda self, slot, prefix: setattr(self, "recurrent", prefix.recurrent))

    with pytest.raises(ModelUnsupported):
        check_split(family, model)
