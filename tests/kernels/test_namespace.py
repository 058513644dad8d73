"""Hugging Face has a package named `kernels` too, and transformers looks for it. Ours must get in nobody's way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TINY_MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config).eval()
with torch.inference_mode():
    print(tuple(model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape))
import kernels
print(kernels.__file__)
"""

NOTHING_ELSE = """
import sys
before = set(sys.modules)
import kernels
print(sorted(set(sys.modules) - before))
print([name for name in vars(kernels) if not name.startswith("__")])
"""

NO_TORCH = """
import sys
import kernels.architecture, kernels.errors, kernels.gguf, kernels.identity, kernels.settings
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def run(code: str, folder: Path) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("place", ["the repository", "elsewhere"])
def test_transformers_works_beside_our_package(place: str, tmp_path: Path) -> None:
    folder = ROOT if place == "the repository" else tmp_path

    shape, file = run(TINY_MODEL, folder)

    assert shape == "(1, 3, 32)"
    assert Path(file) == ROOT / "kernels" / "__init__.py"


def test_importing_our_package_imports_nothing_else(tmp_path: Path) -> None:
    assert run(NOTHING_ELSE, tmp_path) == ["['kernels']", "[]"]


def test_the_rooms_a_submit_host_needs_import_no_torch(tmp_path: Path) -> None:
    assert run(NO_TORCH, tmp_path) == ["[]"]
