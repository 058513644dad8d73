"""LoRA adapters: the split run with one equals peft's own model, which runs it beside the weights."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

peft = pytest.importorskip("peft")

from kernels.adapter import adapter_digest  # noqa: E402 # behind the check for peft
from kernels.errors import AdapterUnusable  # noqa: E402
from kernels.model import LanguageModel, load_model  # noqa: E402
from kernels.prefill import chunk_stops, prefill  # noqa: E402
from kernels.settings import KernelSettings  # noqa: E402

TOLERANCE = 1e-3
CONFIG = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
Build = Callable[[PreTrainedConfig], PreTrainedModel]


@pytest.fixture(autouse=True)
def quiet_peft() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        yield


@pytest.fixture(scope="module")
def base(build_model: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_model(LlamaConfig(**CONFIG, num_hidden_layers=2)).save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, seed: int, **options: Any) -> Path:
    """A random adapter of some size, since peft's new ones change nothing."""
    config = peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM", **options}
    )
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, part in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                part.copy_(torch.randn(part.shape, generator=draw) * 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, seed: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return save_adapter(base, tmp_path_factory.mktemp("adapter"), seed)


def loaded(base: Path, adapter: Path | None) -> LanguageModel:
    return load_model(base, KernelSettings(adapter=adapter, device="cpu", dtype="float32", threads=1))


def greedy(model: LanguageModel, prefix: list[int], question: list[int], steps: int) -> tuple[Tensor, list[int]]:
    """The first logits, and the answer, from a document read in chunks."""
    kv = prefill(model, prefix, stops=chunk_stops(len(prefix), 0, 32)).kv
    suffix = model.new_suffix(1, len(question) + steps)
    pending, stored, answer, first = question, 0, [], None
    for _ in range(steps):
        logits = model.ask(kv, suffix, [pending], [stored])[0]
        first = logits if first is None else first
        stored += len(pending)
        pending = [int(logits.argmax())]
        answer += pending
    assert first is not None
    return first, answer


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "r": 8}, {"use_dora": True}], ids=str)
def test_answers_with_an_adapter_are_those_of_pefts_own_model(
    base: Path, tmp_path: Path, seed: int, generator: torch.Generator, options: dict[str, Any]
) -> None:
    folder = save_adapter(base, tmp_path / "adapter", seed, **options)
    whole = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder).eval()
    ids = torch.randint(3, 96, (100,), generator=generator).tolist()

    first, answer = greedy(loaded(base, folder), ids[:90], ids[90:], 12)

    with torch.inference_mode():
        logits = whole(input_ids=torch.tensor([ids + answer]), use_cache=False).logits[0, 99:-1]
        plain = LlamaForCausalLM.from_pretrained(base)(input_ids=torch.tensor([ids])).logits[0, -1]
    assert (first - logits[0]).abs().max() <= TOLERANCE
    assert (plain - logits[0]).abs().max() > 20 * TOLERANCE  # or the adapter would prove nothing
    for token, row in zip(answer, logits, strict=True):  # the best, up to a tie that float32 cannot tell apart
        assert row.max() - row[token] <= TOLERANCE


def test_the_same_adapter_elsewhere_is_the_same_and_another_is_not(
    base: Path, adapter: Path, tmp_path: Path, seed: int
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    told = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(told | {"base_model_name_or_path": "elsewhere"}))
    digests = {adapter_digest(adapter)}

    assert adapter_digest(copy) in digests
    digests.add(adapter_digest(save_adapter(base, tmp_path / "other", seed + 1)))
    (copy / "adapter_config.json").write_text(json.dumps(told | {"lora_alpha": 99}))
    digests.add(adapter_digest(copy))
    assert len(digests) == 3


def change_config(folder: Path, **change: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            r"adapter_model.safetensors is missing \(of .bin files",
        ),
        (lambda folder: change_config(folder, peft_type="IA3"), "kind IA3, and only LORA"),
        (lambda folder: change_config(folder, alora_invocation_tokens=[1, 2]), "aLoRA"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{"), "cut off"),
        (lambda folder: change_config(folder, target_modules=["q_proj", "v_proj"]), "does not fit .* only one of them"),
        (lambda folder: change_config(folder, target_modules=["query_key_value"]), "does not fit this model"),
    ],
    ids=["no config", "no JSON", "only .bin", "not LoRA", "aLoRA", "cut off", "other layers", "other modules"],
)
def test_an_unusable_adapter_is_refused_in_one_sentence(
    base: Path, adapter: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(adapter, folder)
    damage(folder)

    with pytest.raises(AdapterUnusable, match=said) as caught:
        adapter_digest(folder)
        loaded(base, folder)

    assert caught.value.name == str(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}], ids=str)
def test_an_adapter_of_another_base_model_is_refused(
    build_model: Build, adapter: Path, tmp_path: Path, change: dict[str, int]
) -> None:
    build_model(LlamaConfig(**{**CONFIG, "num_hidden_layers": 2, **change})).save_pretrained(tmp_path / "other")

    with pytest.raises(AdapterUnusable, match="does not fit this model") as caught:
        loaded(tmp_path / "other", adapter)

    assert "\n" not in str(caught.value)


def test_without_peft_the_sentence_names_the_extra(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(AdapterUnusable, match=r"platemaker\[lora\]"):
        loaded(base, adapter)


def test_an_adapter_is_part_of_the_models_name_and_an_empty_variable_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLATEMAKER_MODEL", "/models/base")
    monkeypatch.setenv("PLATEMAKER_ADAPTER", str(tmp_path / "legal"))
    assert KernelSettings().model_name == "base+legal"

    monkeypatch.setenv("PLATEMAKER_ADAPTER", "")
    assert KernelSettings().model_name == "base"
