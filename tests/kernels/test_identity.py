import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kernels import identity
from kernels.architecture import VOLATILE, context_len, read_config
from kernels.errors import ModelIncomplete
from kernels.identity import config_digest, tokenizer_digest, weights_digest

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": None,
    "layer_types": ["full_attention", "sliding_attention"],
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "platemaker"


PARTS = {"model-00001-of-00002.safetensors": 1.0, "model-00002-of-00002.safetensors": 2.0}


def write_index(path: Path, names: Iterable[str]) -> None:
    weight_map = {f"weight.{number}": name for number, name in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def make_folder(path: Path) -> Path:
    path.mkdir()
    for name, value in PARTS.items():
        save_file({"weight": torch.full((200,), value)}, path / name)
    write_index(path, PARTS)
    (path / "tokenizer.json").write_text('{"model": {}}')
    (path / "tokenizer_config.json").write_text("{}")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", sorted(VOLATILE))
def test_where_a_config_came_from_is_no_part_of_its_digest(name: str) -> None:
    assert config_digest(CONFIG | {name: "something"}) == config_digest(CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 65},
        {"hidden_size": "64"},
        {"sliding_window": 4096},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10001.0}},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"something_new": None},
    ],
    ids=str,
)
def test_any_other_change_of_the_config_changes_its_digest(change: dict[str, Any]) -> None:
    assert config_digest(CONFIG | change) != config_digest(CONFIG)


def test_the_order_of_a_config_is_no_part_of_its_digest() -> None:
    assert config_digest(dict(reversed(CONFIG.items()))) == config_digest(CONFIG)


def test_the_text_part_of_a_multimodal_config_counts(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"vision_config": {"size": 1}, "text_config": CONFIG}))

    assert read_config(folder) == CONFIG


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"seq_length": 4096}, 4096),
        ({}, 2048),
    ],
)
def test_the_context_is_found_under_each_of_its_names(config: dict[str, Any], expected: int) -> None:
    assert context_len(config) == expected


def test_equal_weights_in_another_folder_have_an_equal_digest(folder: Path, tmp_path: Path) -> None:
    assert weights_digest(folder) == weights_digest(make_folder(tmp_path / "another name"))


def test_one_flipped_byte_changes_the_digest(folder: Path) -> None:
    before = weights_digest(folder)

    flip_a_byte(folder / "model-00002-of-00002.safetensors")

    assert weights_digest(folder) != before


def test_a_file_more_or_less_in_the_index_changes_the_digest(folder: Path) -> None:
    before = weights_digest(folder)

    write_index(folder, [*PARTS][:1])

    assert weights_digest(folder) != before


def test_a_file_that_is_not_loaded_changes_nothing(folder: Path) -> None:
    before = weights_digest(folder)

    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another form")

    assert weights_digest(folder) == before


def test_swapped_files_change_the_digest(folder: Path) -> None:
    before = weights_digest(folder)
    first, second = sorted(folder.glob("*.safetensors"))
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)

    assert weights_digest(folder) != before


def test_size_and_time_of_change_are_trusted_until_the_cache_is_gone(folder: Path, empty_cache: Path) -> None:
    """The price of not reading gigabytes at every start: a change that hides its time is seen only afresh."""
    before = weights_digest(folder)
    path = folder / "model-00001-of-00002.safetensors"
    stat = path.stat()

    flip_a_byte(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert weights_digest(folder) == before
    (empty_cache / "digests.json").unlink()
    assert weights_digest(folder) != before


def test_unchanged_weights_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights_digest(folder)
    monkeypatch.setattr(identity, "file_digest", lambda path: pytest.fail(f"{path} was read again"))

    assert weights_digest(folder) == first


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": '])
def test_a_damaged_cache_costs_a_reading_only(folder: Path, empty_cache: Path, content: str) -> None:
    before = weights_digest(folder)
    (empty_cache / "digests.json").write_text(content)

    assert weights_digest(folder) == before


def test_any_tokenizer_file_is_part_of_the_tokenizers_digest(folder: Path) -> None:
    digests = {tokenizer_digest(folder)}
    (folder / "tokenizer.json").write_text('{"model": {"a": 1}}')
    digests.add(tokenizer_digest(folder))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    digests.add(tokenizer_digest(folder))
    (folder / "special_tokens_map.json").write_text("{}")
    digests.add(tokenizer_digest(folder))

    assert len(digests) == 4


def test_equal_tokenizers_in_another_folder_have_an_equal_digest(folder: Path, tmp_path: Path) -> None:
    assert tokenizer_digest(folder) == tokenizer_digest(make_folder(tmp_path / "another name"))


def test_digests_do_not_depend_on_pythons_hash_seed(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kernels.identity import *; from kernels.architecture import *\n"
        "f = Path(sys.argv[1]); print(weights_digest(f), tokenizer_digest(f), config_digest(read_config(f)))"
    )
    here = f"{weights_digest(folder)} {tokenizer_digest(folder)} {config_digest(CONFIG)}\n"

    for seed in ("0", "1", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "XDG_CACHE_HOME": str(folder / seed)}
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert (done.stderr, done.stdout) == ("", here)


@pytest.mark.parametrize(
    ("lost", "digest", "what"),
    [
        ("model*", weights_digest, "no .safetensors file"),
        ("tokenizer*", tokenizer_digest, "no tokenizer files"),
        ("config.json", read_config, "config.json is missing"),
    ],
)
def test_a_folder_that_lacks_something_is_incomplete(folder: Path, lost: str, digest: Any, what: str) -> None:
    for path in folder.glob(lost):
        path.unlink()

    with pytest.raises(ModelIncomplete, match=what) as caught:
        digest(folder)

    assert caught.value.name == str(folder)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe"])
def test_a_config_that_is_no_json_is_incomplete(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)

    with pytest.raises(ModelIncomplete, match="not valid JSON"):
        read_config(folder)
