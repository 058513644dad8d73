"""Scaled RoPE: documents longer than the context that the model was trained on, against transformers' whole run."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from kernels.architecture import check_architecture, context_len
from kernels.model import check_split, prepare_model
from kernels.prefill import chunk_stops, prefill

TOLERANCE = 1e-3
TRAINED, FACTOR = 64, 4.0
CONTEXT = int(TRAINED * FACTOR)
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": FACTOR, "original_max_position_embeddings": TRAINED}
SCALED: dict[str, PreTrainedConfig] = {
    "linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": FACTOR}),
    "YaRN": LlamaConfig(**SIZES, rope_parameters=YARN),
    "YaRN with its own attention factor": Qwen2Config(
        **SIZES, rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
    ),
    "Llama 3": LlamaConfig(
        **SIZES, rope_parameters=YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_document_longer_than_the_trained_context_is_read_as_in_one_run(
    name: str, build_model: Callable[[PreTrainedConfig], PreTrainedModel], generator: torch.Generator
) -> None:
    config = copy.deepcopy(SCALED[name])
    check_architecture(name, config.to_dict())
    hf = build_model(config)
    whole, unscaled = copy.deepcopy(hf), copy.deepcopy(config)
    whole.set_attn_implementation("eager")
    unscaled.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    plain = build_model(unscaled)
    plain.load_state_dict(hf.state_dict())
    model = prepare_model(hf, torch.device("cpu"), CONTEXT)
    check_split(name, model)
    ids = torch.randint(3, 96, (CONTEXT - 8,), generator=generator).tolist()
    cut = len(ids) - 20

    kv = prefill(model, ids[:cut], stops=chunk_stops(cut, 0, 50)).kv
    logits = model.ask(kv, model.new_suffix(1, 20), [ids[cut:]], [0])[0]

    with torch.inference_mode():
        expected, without = (
            each(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1] for each in (whole, plain)
        )
    assert (logits - expected).abs().max() <= TOLERANCE
    assert (without - expected).abs().max() > 20 * TOLERANCE  # or the scaling would prove nothing


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": TRAINED, "rope_scaling": YARN}, CONTEXT),
        ({"max_position_embeddings": CONTEXT, "rope_parameters": YARN}, CONTEXT),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 32768),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
    ],
    ids=["trained length named", "stretched length named", "no trained length", "linear"],
)  # fmt: skip
def test_the_context_is_the_one_yarn_stretches_to(config: dict[str, Any], expected: int) -> None:
    assert context_len(config) == expected
