"""What memory is said to be needed beforehand, and what is really taken; a long document."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from kernels import memory
from kernels.errors import MemoryExceeded
from kernels.kv import PrefixKV
from kernels.memory import Need, available_bytes, check_room, decode_need, prefill_need
from kernels.model import LanguageModel, prepare_model
from kernels.prefill import chunk_stops, prefill
from tests.kernels.families import CONTEXT, SUPPORTED_FAMILIES

CPU = torch.device("cpu")
MB = 1_000_000


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "deepseek-v3", "qwen3-next", "falcon-h1"])
def test_the_kv_that_is_predicted_is_the_kv_that_is_taken(
    family: str, build_model: Callable[[PreTrainedConfig], PreTrainedModel]
) -> None:
    """Exactly, but for windows, of which the last chunk may be short, and the second copy of compressed keys."""
    model = prepare_model(build_model(SUPPORTED_FAMILIES[family]), CPU, CONTEXT)
    ids = [5 + index % 80 for index in range(128)]
    kv = prefill(model, ids, stops=chunk_stops(128, 0, 64)).kv
    suffix = model.new_suffix(3, 12)
    model.ask(kv, suffix, [[7, 8], [9, 10], [11, 12]], [0, 0, 0])

    read = prefill_need(model, 128, chunk_tokens=64).prefix_kv
    own = decode_need(model, 128, slots=3, slot_tokens=12, step_tokens=6).suffix_kv

    if model.layout.latent:
        assert read == 2 * kv.size_bytes and own == 2 * suffix.size_bytes
    else:
        assert own == suffix.size_bytes
        assert read == kv.size_bytes


def test_a_lossy_codec_needs_a_second_kv(tiny_llama: LanguageModel) -> None:
    exact, lossy = (prefill_need(tiny_llama, 200, chunk_tokens=64, codec=codec) for codec in ("none", "int8"))

    assert lossy.prefix_kv == 2 * exact.prefix_kv


def test_tied_weights_count_once(build_model: Callable[[PreTrainedConfig], PreTrainedModel]) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied, apart = (build_model(LlamaConfig(**sizes, tie_word_embeddings=tie)) for tie in (True, False))

    assert memory.weight_bytes(apart) - memory.weight_bytes(tied) == 96 * 32 * 4


@pytest.mark.parametrize(
    ("need", "advice"),
    [
        (Need(weights=9, prefix_kv=60 * MB, suffix_kv=MB, activations=MB, codec=0), "PLATEMAKER_MEMORY_CACHE_MB"),
        (Need(weights=9, prefix_kv=MB, suffix_kv=60 * MB, activations=MB, codec=0), "PLATEMAKER_MAX_BATCH"),
        (Need(weights=9, prefix_kv=MB, suffix_kv=0, activations=61 * MB, codec=0), "PLATEMAKER_CHUNK_TOKENS"),
    ],
)
def test_what_will_not_fit_is_refused_with_what_is_missing_and_what_would_help(need: Need, advice: str) -> None:
    check_room(need, CPU, "Reading", available=62 * MB)

    with pytest.raises(MemoryExceeded, match=f"Reading needs 62 MB more .* 50 MB are free on cpu: 12 MB .*{advice}"):
        check_room(need, CPU, "Reading", available=50 * MB)


def test_the_memory_of_this_machine_is_known() -> None:
    free = available_bytes(CPU)

    with pytest.raises(MemoryExceeded) as caught:
        check_room(Need(0, 1 << 60, 0, 0, 0), CPU, "Reading")
    assert caught.value.needed == 1 << 60
    assert 0 < free < 1 << 50


def write_group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


def test_each_control_group_around_the_process_limits_it(tmp_path: Path) -> None:
    """Of version 2 and of version 1; cached files are given back and count as free."""
    two, one = ("memory.max", "memory.current", "inactive_file"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write_group(tmp_path / "work" / "job", two, "1000", 400, 150)
    write_group(tmp_path / "work", two, "5000", 4600, 0)
    write_group(tmp_path, two, "max", 9000, 0)
    write_group(tmp_path / "memory" / "box", (*one, "total_inactive_file"), "700", 800, 50)
    membership = tmp_path / "cgroup"
    membership.write_text("12:cpu,cpuacct:/box\n5:memory:/box\n0::/work/job\n")

    assert sorted(memory._group_rooms(tmp_path, membership)) == [0, 400, 750]


def test_a_long_document_is_read_and_answered_as_in_one_run(
    build_model: Callable[[PreTrainedConfig], PreTrainedModel], generator: torch.Generator
) -> None:
    """With transformers' memory-saving attention as the reference, since eager scores would take gigabytes."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32_768, initializer_range=0.3,
    )  # fmt: skip
    whole = build_model(config)
    whole.set_attn_implementation("sdpa")
    ids = torch.randint(3, 96, (20_000,), generator=generator).tolist()
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
    model = prepare_model(whole, CPU, 32_768)

    kv: PrefixKV = prefill(model, ids[:-9], stops=chunk_stops(len(ids) - 9, 0, 1024)).kv
    logits = model.ask(kv, model.new_suffix(1, 9), [ids[-9:]], [0])[0]

    assert (logits - expected).abs().max() <= 1e-3
