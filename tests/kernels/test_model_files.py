"""A model folder that is not whole is refused in one sentence that names the file; one that is whole is mapped."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from kernels.errors import ModelIncomplete
from kernels.identity import weights_digest
from kernels.model import load_model
from kernels.settings import KernelSettings

SETTINGS = KernelSettings(device="cpu", dtype="float32", threads=1)
INDEX = "model.safetensors.index.json"
CONFIG = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture
def folder(build_model: Callable[[PreTrainedConfig], PreTrainedModel], tmp_path: Path) -> Path:
    build_model(LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "model", max_shard_size="60KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    return tmp_path / "model"


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut_off(folder: Path, at: int) -> None:
    path = parts(folder)[1]
    path.write_bytes(path.read_bytes()[:at])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def change_weight(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = parts(folder)[-1]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, path.name)
    (folder / INDEX).write_text(json.dumps(index))


def change_config(folder: Path, **change: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: parts(folder)[1].unlink(), r"model-00002-of-\d+.safetensors is missing, which .*json"),
        (lambda folder: (folder / INDEX).unlink(), "but neither model.safetensors nor model.safetensors.index.json"),
        (lambda folder: (folder / INDEX).write_text("{}"), "index.json is damaged"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "../a"}}'), "index.json is damaged"),
        (lambda folder: cut_off(folder, 5), "model-00002-of-.* is cut off or no safetensors file"),
        (lambda folder: cut_off(folder, 50), "model-00002-of-.* is cut off or no safetensors file"),
        (lambda folder: cut_off(folder, -1), "model-00002-of-.* is cut off: [0-9,]+ of [0-9,]+ bytes"),
        (lambda folder: lengthen(parts(folder)[0]), "model-00001-of-.* is too long"),
    ],
    ids=["part lost", "index lost", "index empty", "index leaves", "5 bytes", "50 bytes", "last byte", "too long"],
)  # fmt: skip
def test_weight_files_that_are_not_whole_are_refused_before_they_are_read(
    folder: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(folder)

    for use in (lambda: weights_digest(folder), lambda: load_model(folder, SETTINGS)):
        with pytest.raises(ModelIncomplete, match=said) as caught:
            use()
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)


def test_pickled_weights_are_named_and_not_read(folder: Path) -> None:
    for path in (*parts(folder), folder / INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")

    with pytest.raises(ModelIncomplete, match=r"no .safetensors file \(pytorch_model.bin is pickled and never read\)"):
        load_model(folder, SETTINGS)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda folder: change_weight(folder, lambda held: held.pop(next(iter(held)))),
            "1 weights are missing, '.*weight' among them",
        ),
        (
            lambda folder: change_weight(folder, lambda held: held.update({next(iter(held)): torch.zeros(3, 3)})),
            r"is \(3, 3\) in its files and \(.*\) by its config.json",
        ),
        (lambda folder: change_config(folder, num_hidden_layers=1), "weights of layers that config.json leaves out"),
        (lambda folder: change_config(folder, num_hidden_layers=3), "weights are missing"),
        (lambda folder: change_config(folder, hidden_size=32), "in its files and .* by its config.json"),
    ],
    ids=["weight lost", "other shape", "layers left out", "layers missing", "other size"],
)
def test_weights_that_config_does_not_describe_are_refused(
    folder: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(folder)

    with pytest.raises(ModelIncomplete, match=said) as caught:
        load_model(folder, SETTINGS)

    assert "\n" not in str(caught.value)


def mapped_file(tensor: Tensor) -> str:
    """The file whose mapping into this process holds the tensor's first byte; empty where it is plain memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split()
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= tensor.data_ptr() < stop:
            return name[0] if inode != "0" else ""
    return ""


def test_weights_in_the_compute_type_are_the_files_own_pages(folder: Path) -> None:
    """No second copy in memory, and what a process does to its weights never reaches the file."""
    before = [hashlib.sha256(path.read_bytes()).digest() for path in parts(folder)]

    weights = [layer.mlp.up_proj.weight for layer in load_model(folder, SETTINGS).hf.model.layers]

    assert {Path(mapped_file(weight)).parent for weight in weights} == {folder}
    with torch.no_grad():
        weights[0].add_(1)
    assert [hashlib.sha256(path.read_bytes()).digest() for path in parts(folder)] == before


def test_weights_of_another_type_are_converted_once(folder: Path) -> None:
    model = load_model(folder, SETTINGS.model_copy(update={"dtype": "bfloat16"}))

    weight = model.hf.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    assert mapped_file(weight) == ""
