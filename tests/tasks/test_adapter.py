"""An adapter is another model: other snapshots, wherever its folder lies."""

import shutil
import warnings
from pathlib import Path

import pytest

peft = pytest.importorskip("peft")

from transformers import AutoModelForCausalLM  # noqa: E402 # behind the check for peft

from kernels.settings import KernelSettings  # noqa: E402
from storage.fingerprint import Fingerprint  # noqa: E402
from tasks.engine import Engine  # noqa: E402


def save_adapter(model: Path, folder: Path, alpha: int) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, about names in transformers
        adapted = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(lora_alpha=alpha, target_modules=["q_proj"])
        )
    adapted.save_pretrained(folder)
    return folder


def fingerprint(model: Path, adapter: Path | None) -> Fingerprint:
    return Engine(KernelSettings(model=str(model), adapter=adapter)).fingerprint("default", "d" * 64, [1, 2, 3])


def test_the_fingerprint_tells_adapters_apart_by_their_content(tiny_model: Path, tmp_path: Path) -> None:
    one, other = save_adapter(tiny_model, tmp_path / "one", 8), save_adapter(tiny_model, tmp_path / "other", 16)
    moved = Path(shutil.copytree(one, tmp_path / "moved"))

    plain, first, second, third = (fingerprint(tiny_model, adapter) for adapter in (None, one, other, moved))

    assert plain.adapter == ""
    assert first == third
    assert len({plain.digest(), first.digest(), second.digest()}) == 3
    assert len({plain.chain_root(), first.chain_root(), second.chain_root()}) == 3
    here, there = plain.fields(), first.fields()
    assert [name for name in here if here[name] != there[name]] == ["adapter"]
