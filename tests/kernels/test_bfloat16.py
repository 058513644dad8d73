"""Small random models in bfloat16: splitting adds no error to that of transformers' own run in bfloat16."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from kernels.model import LanguageModel, prepare_model
from kernels.native.backend import load_library
from kernels.prefill import chunk_stops, prefill
from tests.kernels.families import CONTEXT, SUPPORTED_FAMILIES

# Sizes that native code multiplies in pairs, where the CPU has instructions for that.
PAIRED = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": CONTEXT,
}  # fmt: skip
FAMILIES: dict[str, PreTrainedConfig] = {name: SUPPORTED_FAMILIES[name] for name in ("llama", "gemma2", "qwen3")} | {
    "llama in pairs": LlamaConfig(**PAIRED, attention_bias=True, mlp_bias=True),
    "qwen3 in pairs": Qwen3Config(**PAIRED),
    "mistral in pairs": MistralConfig(**PAIRED, sliding_window=40),
}
QUESTIONS = (9, 17, 3, 12, 5, 20)
LIMIT = 1.25


@pytest.mark.parametrize("family", FAMILIES)
def test_our_error_in_bfloat16_is_at_most_that_of_transformers(
    family: str, build_model: Callable[[PreTrainedConfig], PreTrainedModel], generator: torch.Generator, compiler: str
) -> None:
    """Over every token of the questions; measured ratios are 0.84 to 1.02, and 0.4 to 0.8 in pairs."""
    narrow = build_model(copy.deepcopy(FAMILIES[family])).bfloat16()
    narrow.set_attn_implementation("eager")
    wide = copy.deepcopy(narrow).float()  # the same weights, rounded
    document = torch.randint(3, 128, (120,), generator=generator).tolist()
    questions = [torch.randint(3, 128, (count,), generator=generator).tolist() for count in QUESTIONS]
    expected, theirs = (whole_logits(hf, document, questions) for hf in (wide, narrow))

    model = prepare_model(narrow, torch.device("cpu"), CONTEXT)
    if family.endswith("in pairs"):
        assert (model.decoder is not None) == (load_library().pairs > 0)
    kv = prefill(model, document, stops=chunk_stops(len(document), 0, 50)).kv
    beginnings = [question[: stop + 1] for question in questions for stop in range(len(question))]
    ours = model.ask(kv, model.new_suffix(len(beginnings), max(QUESTIONS)), beginnings, [0] * len(beginnings))

    assert (ours - expected).norm() <= LIMIT * (theirs - expected).norm()


@torch.inference_mode()
def whole_logits(hf: PreTrainedModel, document: list[int], questions: list[list[int]]) -> Tensor:
    texts = [torch.tensor([document + question]) for question in questions]
    return torch.cat([hf(input_ids=text, use_cache=False).logits[0, len(document) :].float() for text in texts])


@pytest.mark.parametrize("family", ["llama in pairs", "qwen3 in pairs"])
def test_a_document_read_in_native_code_is_the_same_however_it_is_cut(
    family: str, build_model: Callable[[PreTrainedConfig], PreTrainedModel], generator: torch.Generator, compiler: str
) -> None:
    if not load_library().pairs:
        pytest.skip("this CPU does not multiply bfloat16 in pairs")
    model = prepare_model(build_model(copy.deepcopy(FAMILIES[family])).bfloat16(), torch.device("cpu"), CONTEXT)
    assert model.decoder is not None
    ids = torch.randint(3, 128, (150,), generator=generator).tolist()

    def answer(cuts: list[int], model: LanguageModel) -> Tensor:
        kv = prefill(model, ids, stops=cuts).kv
        return model.ask(kv, model.new_suffix(2, 8), [[5, 9, 11], [7]], [0, 0])

    whole, cut, ordinary = (
        answer([150], model),
        answer([1, 33, 64, 149, 150], model),
        answer([150], replace(model, decoder=None)),
    )
    assert (cut - whole).norm() <= 0.02 * whole.norm()
    assert (ordinary - whole).norm() <= 0.05 * whole.norm()
