"""A causal language model of transformers with our attention, ready for prefill and decode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from kernels.architecture import check_architecture, context_len, read_config
from kernels.device import pick_device, pick_dtype, set_threads
from kernels.errors import ModelIncomplete, ModelMissing, ModelUnsupported
from kernels.gguf import convert_gguf
from kernels.identity import ModelIdentity, config_digest, digest_json, tokenizer_digest, weights_digest
from kernels.kv import LayerShape, PrefixKV, SuffixKV
from kernels.prompt import Prompter
from kernels.settings import KernelSettings, user_cache_dir
from kernels.steps import ATTENTION_NAME, DecodeStep, PrefillStep, run_step

# Relative error of the split run against the whole run on a short random text.
SPLIT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
TRIAL_WINDOW = 6  # narrower than that text, so that sliding windows take part


@dataclass
class LanguageModel:
    """One loaded model; shared by the threads of a process, which take turns."""

    hf: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    context_len: int

    def forward(self, step: PrefillStep | DecodeStep, ids: list[int], keep: Tensor | int) -> Tensor:
        """Logits [kept, vocab] in fp32; see run_step."""
        with torch.inference_mode():
            return run_step(self.hf, step, torch.tensor(ids, device=self.device), keep)

    @cached_property
    def kv_shapes(self) -> dict[int, LayerShape]:
        """What a token takes in each layer, found by running one."""
        kv = PrefixKV(1)
        self.forward(PrefillStep(kv, 0, 1), [0], 1)
        return kv.shapes

    def new_kv(self, capacity: int, make_room: Callable[[int], None] = lambda _size_bytes: None) -> PrefixKV:
        """Room for a document of this many tokens; `make_room(size_bytes)` is called before it is taken."""
        numbers = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in self.kv_shapes.values())
        make_room(capacity * numbers * self.dtype.itemsize)
        return PrefixKV.empty(capacity, self.kv_shapes, dtype=self.dtype, device=self.device)


def model_folder(name: str) -> Path:
    """The local folder of a model named by a folder, a .gguf file or a hub id; fetched or converted if need be.

    Raises:
        ModelMissing: nothing is there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        stem = digest_json([str(path.resolve()), path.stat().st_mtime_ns if path.exists() else 0])[:12]
        return convert_gguf(path, user_cache_dir() / "models" / f"{path.stem.lower()}-{stem}")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelMissing(name, "no such folder. Run scripts/get_model for the small one, or set PLATEMAKER_MODEL")
    from huggingface_hub import snapshot_download  # here: only a hub id needs the network client
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as exc:
        raise ModelMissing(name, "the hub does not give it, and it is not in the local cache") from exc


def model_identity(folder: Path, prompter: Prompter, settings: KernelSettings) -> ModelIdentity:
    """Everything about the model that a snapshot's fingerprint holds. Reads no weight into memory."""
    dtype = pick_dtype(settings.dtype, pick_device(settings.device))
    return ModelIdentity(
        weights=weights_digest(folder),
        config=config_digest(read_config(folder)),
        tokenizer=tokenizer_digest(folder),
        template=prompter.template_digest(),
        kv_dtype=str(dtype).removeprefix("torch."),
    )


def load_model(folder: Path, settings: KernelSettings) -> LanguageModel:
    """Loads the weights and proves on a short random text that splitting them is exact.

    Raises:
        ModelError: a subclass with the reason.
    """
    disable_progress_bar()  # the screen is the pipeline's, and logs are no place for bars
    set_threads(settings.threads)
    config = read_config(folder)
    check_architecture(folder.name, config)
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    try:
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise ModelIncomplete(str(folder), f"transformers cannot load it ({str(exc).splitlines()[0]})") from exc
    hf, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelIncomplete(str(folder), f"{len(missing)} weights are missing, {missing[0]!r} among them")
    model = prepare_model(hf, device, context_len(config))
    check_split(folder.name, model)
    return model


def prepare_model(hf: PreTrainedModel, device: torch.device, context: int) -> LanguageModel:
    """Puts our attention into a transformers model."""
    hf = hf.to(device).eval()
    hf.set_attn_implementation(ATTENTION_NAME)
    return LanguageModel(hf, device, next(hf.parameters()).dtype, context)


def check_split(name: str, model: LanguageModel) -> None:
    """Compares prefill in two chunks plus a shared-prefix step with one eager run over the same random tokens.

    Sliding windows are narrowed for it: some models put theirs into the mask and never tell the attention.

    Raises:
        ModelUnsupported: they differ, so this architecture has something that our steps do not know.
    """
    check_architecture(name, model.hf.config.get_text_config().to_dict())  # with what config.json leaves out
    generator = torch.Generator().manual_seed(20261129)
    vocab = model.hf.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (24,), generator=generator).tolist()
    try:
        with _narrow_windows(model.hf):
            split, whole = _split_run(model, ids), _whole_run(model, ids)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as exc:
        raise ModelUnsupported(name, f"its attention cannot be replaced ({type(exc).__name__}: {exc})") from exc
    expected = whole[[21, 22, 23, 18]]
    error = float((split - expected).norm() / expected.norm())
    if not error <= SPLIT_TOLERANCE[model.dtype]:
        raise ModelUnsupported(
            name, f"its split run differs from its whole run by {error:.2%}, so answers would not be exact"
        )


def _split_run(model: LanguageModel, ids: list[int]) -> Tensor:
    """Logits of the tokens 21, 22, 23 and, in another slot, 18."""
    kv = PrefixKV(16)
    model.forward(PrefillStep(kv, 0, 9), ids[:9], 1)
    model.forward(PrefillStep(kv, 9, 7), ids[9:16], 1)
    kv.length = 16
    suffix = SuffixKV(2, 8)
    model.forward(DecodeStep(kv, suffix, [5, 2], [0, 0], model.device), ids[16:21] + ids[16:18], 1)
    step = DecodeStep(kv, suffix, [3, 1], [5, 2], model.device)
    return model.forward(step, ids[21:24] + ids[18:19], torch.tensor([0, 1, 2, 3], device=model.device))


def _whole_run(model: LanguageModel, ids: list[int]) -> Tensor:
    """Logits of every token, from transformers' own attention."""
    model.hf.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: Tensor = model.hf(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    finally:
        model.hf.set_attn_implementation(ATTENTION_NAME)
    return logits.float()


@contextmanager
def _narrow_windows(hf: PreTrainedModel) -> Iterator[None]:
    """Sets every sliding window of the config and of the layers to TRIAL_WINDOW for a while."""
    holders = [hf.config.get_text_config(), *hf.modules()]
    windows = [(holder, vars(holder).get("sliding_window")) for holder in holders]
    found = [(holder, window) for holder, window in windows if isinstance(window, int)]
    try:
        for holder, window in found:
            holder.sliding_window = min(window, TRIAL_WINDOW)
        yield
    finally:
        for holder, window in found:
            holder.sliding_window = window
