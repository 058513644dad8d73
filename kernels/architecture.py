"""What a model's config.json says before any weight is read: its context, and whether it can be split.

Imports no torch, so that a submit host can refuse a model at once.
"""

import json
from pathlib import Path
from typing import Any

from kernels.errors import ModelIncomplete, ModelUnsupported

VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_commit_hash",
    "_attn_implementation_autoset",
}
# What config files call layers that keep all tokens, a window of them, a state, both, or nothing.
KNOWN_LAYERS = {
    "full_attention",
    "attention",
    "sliding_attention",
    "linear_attention",
    "mamba",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "moe",
    "mlp",
}


def read_config(folder: Path) -> dict[str, Any]:
    """The text part of a model folder's config.json.

    Raises:
        ModelIncomplete: the file is missing or not JSON.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError as exc:
        raise ModelIncomplete(str(folder), "config.json is missing") from exc
    except ValueError as exc:
        raise ModelIncomplete(str(folder), "config.json is not valid JSON") from exc
    return dict(config.get("text_config", config))


def context_len(config: dict[str, Any]) -> int:
    """How many tokens, prompt and answer together, the model takes. Where YaRN (arXiv:2309.00071) stretches the
    context it was trained on, configs name one or the other as theirs."""
    lengths = [
        int(rope["factor"] * rope["original_max_position_embeddings"])
        for rope in _rope_parts(config)
        if _rope_kind(rope) == "yarn" and rope.get("factor") and rope.get("original_max_position_embeddings")
    ]
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(config.get(name), int):
            return max([int(config[name]), *lengths])
    return max([2048, *lengths])


def check_architecture(name: str, config: dict[str, Any]) -> None:
    """Refuses what cannot be cut exactly at the end of a document.

    Raises:
        ModelUnsupported: with the reason.
    """
    for rope in _rope_parts(config):
        kind = _rope_kind(rope)
        if kind == "dynamic":
            raise ModelUnsupported(name, "its dynamic NTK RoPE changes stored keys when the text grows")
        if kind == "longrope":
            raise ModelUnsupported(name, "its LongRoPE uses other factors for stored keys once the text grows long")
    layers = set(config.get("layer_types") or ())
    unknown = layers - KNOWN_LAYERS
    if unknown:
        raise ModelUnsupported(
            name, f"it has layers of the kind {', '.join(sorted(unknown))}, whose state cannot be stored"
        )
    if config.get("attention_chunk_size"):
        raise ModelUnsupported(name, "it uses chunked local attention")
    if config.get("num_kv_shared_layers"):
        raise ModelUnsupported(name, "some of its layers share one KV cache")
    if config.get("is_encoder_decoder"):
        raise ModelUnsupported(name, "it is an encoder-decoder; only decoder models have a KV prefix")


def _rope_kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The RoPE settings in every place transformers keeps them: one dict, or one per layer type."""
    parts = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, dict):
            parts += [value, *(inner for inner in value.values() if isinstance(inner, dict))]
    return parts
