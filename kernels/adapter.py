"""LoRA adapters (arXiv:2106.09685), read with peft and merged into the weights when the model is loaded.

Merged rather than kept beside them: a step then costs what it costs without an adapter and runs in the same faster
linear layers, and a stored document belongs to one set of weights. A worker has one adapter; another one is another
model, with snapshots of its own. In float32 the merged weight differs from base and adapter computed apart by rounding
only; in half precision the sum is rounded once, as in a model that was merged and saved.
"""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from kernels.errors import AdapterUnusable
from kernels.identity import digest_json, file_digest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What says where an adapter came from or how it was trained, and changes none of its numbers.
VOLATILE = {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"}


def adapter_digest(folder: Path) -> str:
    """SHA-256 (hex) of what the adapter does to the weights, wherever its folder lies.

    Raises:
        AdapterUnusable: a file is missing, or it is no LoRA adapter.
    """
    config = _read_config(folder)
    numbers = {key: value for key, value in config.items() if key not in VOLATILE}
    return digest_json([numbers, file_digest(folder / WEIGHTS)])


def merge_adapter(hf: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Adds the adapter to the weights of `hf`, which it changes and returns.

    Raises:
        AdapterUnusable: peft is not installed, or the adapter was not made for this model, or is damaged.
    """
    _read_config(folder)
    if importlib.util.find_spec("peft") is None:
        raise AdapterUnusable(str(folder), "peft is not installed (pip install 'platemaker[lora]')")
    from peft import PeftModel, get_peft_model_state_dict  # here: only an adapter needs it

    stored = _stored_names(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, about names in transformers and about what is checked below
            adapted = PeftModel.from_pretrained(hf, str(folder), is_trainable=False, use_safetensors=True)
            wanted = get_peft_model_state_dict(adapted)
            odd = sorted(stored ^ wanted.keys())
            if odd:
                raise AdapterUnusable(str(folder), _other_base(folder, f"{odd[0]} is in only one of them"))
            merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError, KeyError, TypeError) as exc:
        raise AdapterUnusable(str(folder), _other_base(folder, _first_line(exc))) from exc
    return merged


def _read_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            hint = " (of .bin files only the safetensors form is read)" if name == WEIGHTS else ""
            raise AdapterUnusable(str(folder), f"{name} is missing{hint}")
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except ValueError as exc:
        raise AdapterUnusable(str(folder), f"{CONFIG} is not valid JSON") from exc
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise AdapterUnusable(str(folder), f"it is of the kind {kind}, and only LORA can be merged")
    if config.get("alora_invocation_tokens"):
        raise AdapterUnusable(str(folder), "it acts only behind certain tokens (aLoRA), which merged weights cannot")
    return dict(config)


def _stored_names(folder: Path) -> set[str]:
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return set(file.keys())
    except SafetensorError as exc:
        raise AdapterUnusable(str(folder), f"{WEIGHTS} is cut off or no safetensors file") from exc


def _other_base(folder: Path, what: str) -> str:
    base = _read_config(folder).get("base_model_name_or_path")
    made_for = f", which was made for {base!r}" if base else ""
    return f"it does not fit this model{made_for}: {what}"


def _first_line(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    told = lines[1] if len(lines) > 1 and lines[0].endswith(":") else (lines or [type(exc).__name__])[0]
    return told.rstrip(".")
