"""A causal language model of transformers with our attention, ready for prefill and decode."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from kernels.adapter import adapter_digest, merge_adapter
from kernels.architecture import check_architecture, context_len, read_config
from kernels.backend import quicken_model
from kernels.device import pick_device, pick_dtype, set_threads
from kernels.drafting import StepTimes
from kernels.errors import ChunkMismatch, ModelIncomplete, ModelMissing, ModelUnsupported
from kernels.folder import weight_files
from kernels.fused import pick_decoder
from kernels.gguf import convert_gguf
from kernels.identity import ModelIdentity, config_digest, digest_json, tokenizer_digest, weights_digest
from kernels.kv import PrefixKV, SuffixKV, to_index
from kernels.layout import KVLayout, LayerShape
from kernels.native.decoder import NativeDecoder
from kernels.prompt import Prompter
from kernels.sampling import Look, look_at
from kernels.settings import KernelSettings, user_cache_dir
from kernels.steps import ATTENTION_NAME, DecodeStep, JoinedStep, PrefillStep, Step, run_step
from kernels.survey import survey

# Relative error of the split run against the whole run on a short random text.
SPLIT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
TRIAL_WINDOW = 6  # narrower than that text, so that sliding windows take part
TRIAL_TOKENS = [20, 17, 22, 18, 23, 19]


@dataclass(frozen=True)
class Asked:
    """What one document's slots are asked in a step; see `LanguageModel.ask`."""

    prefix: PrefixKV
    suffix: SuffixKV
    pending: Sequence[list[int]]
    lengths: Sequence[int]


@dataclass
class LanguageModel:
    """One loaded model; shared by the threads of a process, which take turns."""

    hf: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    context_len: int
    decoder: NativeDecoder | None = None
    step_times: StepTimes = field(default_factory=StepTimes)

    @cached_property
    def layout(self) -> KVLayout:
        """What each layer keeps; learnt from one short run when first needed."""
        return survey(self.hf, self.device, self.context_len)

    @property
    def parts(self) -> tuple["LanguageModel", ...]:
        """What of it takes memory for itself."""
        return (self,)

    @property
    def windows(self) -> dict[int, int]:
        """The layers that see only so many tokens back, their own counted."""
        return dict(self.layout.windows)

    @property
    def kv_shapes(self) -> dict[int, LayerShape]:
        """What a token takes in each of the layers that keep every token."""
        return {layer: self.layout.tokens[layer] for layer in self.layout.token_layers}

    def new_kv(self, capacity: int, make_room: Callable[[int], None] = lambda _size_bytes: None) -> PrefixKV:
        """Room for a document of this many tokens; `make_room(size_bytes)` is called before it is taken."""
        make_room(self.prefix_bytes(capacity))
        return PrefixKV.empty(capacity, self.kv_shapes, dtype=self.layout.dtype, device=self.device, layout=self.layout)

    def prefix_bytes(self, capacity: int) -> int:
        """What a document of this many tokens takes in the layers that keep every token."""
        return capacity * sum(map(self.layout.token_bytes, self.layout.token_layers))

    def new_suffix(self, slots: int, capacity: int) -> SuffixKV:
        return SuffixKV(slots, capacity, self.layout)

    def forward(self, step: Step, ids: list[int], keep: Tensor | int) -> Tensor:
        """Logits [kept, vocab] in fp32; see run_step."""
        if (
            self.decoder is not None
            and type(step) is PrefillStep
            and isinstance(keep, int)
            and self.decoder.reads(step.kv)
        ):
            return self.decoder.read(step.kv, step.start, torch.tensor(ids), keep)
        with torch.inference_mode():
            return run_step(self.hf, step, torch.tensor(ids, device=self.device), keep)

    def ask(self, prefix: PrefixKV, suffix: SuffixKV, pending: Sequence[list[int]], lengths: Sequence[int]) -> Tensor:
        """Runs the pending tokens of the slots 0, 1, ..; returns the logits [slots, vocab] after each one's last.

        `lengths[i]` tokens of slot i are stored already; afterwards its pending ones are too.

        Raises:
            ChunkMismatch: the prefix was loaded without this model's layout, or without its state.
        """
        return self.ask_all([Asked(prefix, suffix, pending, lengths)])

    def ask_all(self, documents: Iterable[Asked], *, every: bool = False) -> Tensor:
        """The same over several documents in one pass; the logits are in the order of documents and their slots.
        `every`: the logits [tokens, vocab] after each of the pending tokens instead.

        Raises:
            ChunkMismatch: as `ask`.
        """
        asked = list(documents)
        for document in asked:
            self.check_prefix(document.prefix)
        if self.layout.recurrent:
            return torch.cat([self._ask_in_rows(document, every) for document in asked])
        steps = [
            DecodeStep(each.prefix, each.suffix, [len(tokens) for tokens in each.pending], each.lengths, self.device)
            for each in asked
        ]
        pending = [tokens for each in asked for tokens in each.pending]
        ids, ends = _joined(pending), list(accumulate(len(tokens) for tokens in pending))
        if self.decoder is not None and self.decoder.takes(steps):
            keep = slice(None) if every else torch.tensor(ends) - 1
            return self.decoder.logits(steps, torch.tensor(ids), keep, self.windows)
        step = steps[0] if len(steps) == 1 else JoinedStep(steps)
        last = to_index([end - 1 for end in ends], self.device)
        return self.forward(step, ids, len(ids) if every else last)

    def look(self, logits: Tensor) -> Look:
        """At logits [rows, vocab]."""
        if self.decoder is None or logits.dtype != torch.float32:
            return look_at(logits)
        return self.decoder.look(logits)

    def _ask_in_rows(self, asked: Asked, every: bool) -> Tensor:
        """A row of its own for each slot, those of one length together."""
        logits, first = [], 0
        for count, group in groupby(len(tokens) for tokens in asked.pending):
            stop = first + len(list(group))
            taken = asked.lengths[first:stop]
            step = DecodeStep(asked.prefix, asked.suffix, [count] * len(taken), taken, self.device, first_slot=first)
            logits.append(self.forward(step, _joined(asked.pending[first:stop]), count if every else 1))
            first = stop
        return torch.cat(logits)

    def check_prefix(self, prefix: PrefixKV) -> None:
        """
        Raises:
            ChunkMismatch: as `ask`.
        """
        if (self.layout.latent or self.layout.recurrent) and prefix.layout != self.layout:
            raise ChunkMismatch("it was loaded without the model's layout")
        if self.layout.recurrent and prefix.length and not prefix.recurrent:
            raise ChunkMismatch("its recurrent state is missing")
        if prefix.length and prefix.layout.windows.keys() != prefix.windows.keys():
            raise ChunkMismatch("its windows are missing")


def _joined(pending: Sequence[list[int]]) -> list[int]:
    return [token for tokens in pending for token in tokens]


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
        adapter="" if settings.adapter is None else adapter_digest(settings.adapter),
        tokenizer=tokenizer_digest(folder),
        template=prompter.template_digest(),
        kv_dtype=str(dtype).removeprefix("torch."),
    )


def load_model(folder: Path, settings: KernelSettings, *, ranks: int = 1) -> LanguageModel:
    """Loads the weights and proves on a short random text that splitting them is exact.

    Weights that are stored in the compute dtype stay in the file's own pages, mapped privately. With several `ranks`,
    each process of the group calls this at the same time and gets its part of the weights.

    Raises:
        ModelError: a subclass with the reason.
    """
    disable_progress_bar()  # the screen is the pipeline's, and logs are no place for bars
    set_verbosity_error()  # its reports of missing weights take many lines; ours is one sentence
    set_threads(settings.threads)
    config = read_config(folder)
    check_architecture(folder.name, config)
    weight_files(folder)
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    parallel = {"distributed_config": {"tp_size": ranks}} if ranks > 1 else {}
    try:
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **parallel,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as exc:
        raise ModelIncomplete(str(folder), f"transformers cannot load it ({str(exc).splitlines()[0]})") from exc
    hf, info = loaded
    check_weights(folder, hf, info)
    if settings.adapter is not None:
        hf = merge_adapter(hf, settings.adapter)
    model = prepare_model(hf, device, context_len(config), quicken=ranks == 1)
    check_split(folder.name, model)
    return model


def check_weights(folder: Path, hf: PreTrainedModel, info: dict[str, Any]) -> None:
    """
    Raises:
        ModelIncomplete: config.json describes other weights than those in the files.
    """
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise ModelIncomplete(
            str(folder), f"{name} is {tuple(found)} in its files and {tuple(wanted)} by its config.json"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelIncomplete(str(folder), f"{len(missing)} weights are missing, {missing[0]!r} among them")
    own = {re.sub(r"\d+", "*", name) for name, _ in hf.named_parameters()}
    more = sorted(name for name in info["unexpected_keys"] if re.sub(r"\d+", "*", name) in own)
    if more:
        raise ModelIncomplete(
            str(folder),
            f"its files hold {len(more)} weights of layers that config.json leaves out, {more[0]!r} among them",
        )


def prepare_model(hf: PreTrainedModel, device: torch.device, context: int, *, quicken: bool = True) -> LanguageModel:
    """Puts our attention into a transformers model."""
    hf = hf.to(device).eval()
    hf.set_attn_implementation(ATTENTION_NAME)
    if quicken:
        quicken_model(hf, device)
    decoder = pick_decoder(hf) if quicken else None
    return LanguageModel(hf, device, next(hf.parameters()).dtype, context, decoder)


def check_split(name: str, model: LanguageModel) -> None:
    """Compares prefill in two chunks, stored and restored, plus shared-prefix steps with one eager run over the same
    random tokens.

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
            narrow = replace(model)  # learns the narrowed windows, and forgets them
            split, whole = _split_run(narrow, ids), _whole_run(model, ids)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as exc:
        raise ModelUnsupported(name, f"it does not run in our steps ({type(exc).__name__}: {exc})") from exc
    expected = whole[TRIAL_TOKENS]
    error = float((split - expected).norm() / expected.norm())
    if not error <= SPLIT_TOLERANCE[model.dtype]:
        raise ModelUnsupported(
            name, f"its split run differs from its whole run by {error:.2%}, so answers would not be exact"
        )


def _split_run(model: LanguageModel, ids: list[int]) -> Tensor:
    """Logits of TRIAL_TOKENS: two chunks, their stored form between them and behind them, and two slots."""
    kv = model.new_kv(16)
    for start, stop in ((0, 9), (9, 16)):
        kv = _restored(model, kv)
        model.forward(PrefillStep(kv, start, stop - start), ids[start:stop], 1)
        kv.length = stop
    kv = _restored(model, kv)
    suffix = model.new_suffix(2, 8)
    logits = [model.ask(kv, suffix, [ids[16:21], ids[16:18]], [0, 0])]
    logits.append(model.ask(kv, suffix, [ids[21:23], ids[18:19]], [5, 2]))
    logits.append(model.ask(kv, suffix, [ids[23:24], ids[19:20]], [7, 3]))
    return torch.cat(logits)


def _restored(model: LanguageModel, kv: PrefixKV) -> PrefixKV:
    """As it comes back from a store."""
    fresh = model.new_kv(kv.capacity)
    for layer in kv.token_layers if kv.length else ():
        fresh.write(layer, 0, kv.keys[layer][:, : kv.length], kv.values[layer][:, : kv.length])
    if kv.length:
        fresh.set_state(kv.length, kv.state())
    return fresh


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
