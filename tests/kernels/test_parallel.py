"""Several ranks, each a process with its part of the model, compute and store what one does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2Config

from kernels.cards import pin_cards, rank_environment
from kernels.codecs import decode_chunk, decode_state, encode_chunk, encode_state
from kernels.errors import CardsConflict, ModelUnsupported
from kernels.group import check_heads, load_parallel
from kernels.kv import PrefixKV
from kernels.model import LanguageModel, load_model
from kernels.parallel import ParallelModel
from kernels.prefill import check_probe, prefill
from kernels.settings import KernelSettings

TOLERANCE = 1e-3
CONFIG: dict[str, Any] = {
    "vocab_size": 97,  # not divisible: the last rank has fewer rows
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
COUNT = 4  # tests/tasks/test_parallel.py has two
LAYERS = {"use_sliding_window": True, "sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"]}
STOPS = (30, 64, 100)


@pytest.fixture(scope="module")
def both(
    build_model: Callable[[PreTrainedConfig], PreTrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LanguageModel, ParallelModel]]:
    folder = tmp_path_factory.mktemp("model")
    build_model(Qwen2Config(**CONFIG, **LAYERS)).save_pretrained(folder)
    settings = KernelSettings(device="cpu", dtype="float32", threads=1)
    parallel = load_parallel(folder, settings.model_copy(update={"tensor_parallel": COUNT}))
    yield load_model(folder, settings), parallel
    parallel.close()


def random_ids(generator: torch.Generator, count: int) -> list[int]:
    ids: list[int] = torch.randint(3, 97, (count,), generator=generator).tolist()
    return ids


def stored(model: LanguageModel, ids: list[int]) -> tuple[list[bytes], bytes, PrefixKV]:
    """The document as it goes to a store: chunks, and the state behind the last."""
    chunks: list[bytes] = []
    done = prefill(
        model,
        ids,
        stops=STOPS,
        on_chunk=lambda kv, start, stop: chunks.append(encode_chunk(kv, start, stop, "none")),
    )
    return chunks, encode_state(done.kv), done.kv


def restored(model: LanguageModel, chunks: list[bytes], state: bytes) -> PrefixKV:
    kv = model.new_kv(STOPS[-1])
    for data, start, stop in zip(chunks, (0, *STOPS), STOPS, strict=False):
        decode_chunk(data, kv, start, stop, codec="none", dtype="float32", device="cpu")
    decode_state(state, kv, STOPS[-1], device="cpu")
    return kv


def ask(model: LanguageModel, kv: PrefixKV, questions: list[list[int]]) -> Tensor:
    """Logits of two steps, with a slot moved, cleared and grown between them as the decoder does."""
    suffix = model.new_suffix(4, 0)
    suffix.grow(4, 12)
    first = model.ask(kv, suffix, questions, [0] * 3)
    suffix.move(2, 0, len(questions[2]))
    suffix.clear(2)
    suffix.grow(5, 16)
    second = model.ask(kv, suffix, [[5], [6, 7]], [len(questions[2]), len(questions[1])])
    return torch.cat([first, second])


def test_what_ranks_store_and_answer_is_what_one_does(
    both: tuple[LanguageModel, ParallelModel], generator: torch.Generator
) -> None:
    """Chunks of several ranks are loaded by one and the other way round: nothing of the ranks is in them."""
    one, several = both
    ids, questions = random_ids(generator, STOPS[-1]), [random_ids(generator, count) for count in (3, 9, 5)]
    ones, theirs = stored(one, ids), stored(several, ids)
    expected = ask(one, ones[2], questions)

    found = {
        "both by several": ask(several, theirs[2], questions),
        "stored by several": ask(one, restored(one, *theirs[:2]), questions),
        "stored by one": ask(several, restored(several, *ones[:2]), questions),
    }

    assert [len(data) for data in theirs[0]] == [len(data) for data in ones[0]]
    for way, logits in found.items():
        error = float((logits - expected).abs().max())
        assert error <= TOLERANCE, f"{way}: {error:.1e}"
    assert expected.abs().max() > 100 * TOLERANCE


def test_a_prefill_goes_on_behind_what_one_rank_stored(
    both: tuple[LanguageModel, ParallelModel], generator: torch.Generator
) -> None:
    one, several = both
    ids = random_ids(generator, STOPS[-1])
    chunks, states = [], []

    def keep(kv: PrefixKV, start: int, stop: int) -> None:
        chunks.append(encode_chunk(kv, start, stop, "none"))
        states.append(encode_state(kv))

    whole = prefill(one, ids, stops=STOPS, on_chunk=keep)
    kv = several.new_kv(len(ids))
    for data, start, stop in zip(chunks[:2], (0, *STOPS), STOPS, strict=False):
        decode_chunk(data, kv, start, stop, codec="none", dtype="float32", device="cpu")
    decode_state(states[1], kv, STOPS[1], device="cpu")

    done = prefill(several, ids, stops=STOPS, kv=kv)

    assert done.computed_tokens == STOPS[2] - STOPS[1]
    check_probe(one, ids[-1], done.kv, whole.probe)
    check_probe(several, ids[-1], done.kv, whole.probe)


def test_the_ranks_keep_nothing_of_what_is_dropped(both: tuple[LanguageModel, ParallelModel]) -> None:
    several = both[1]
    kv, suffix = several.new_kv(16), several.new_suffix(1, 4)
    del kv, suffix

    several.new_suffix(1, 1)

    assert len(several.rank._prefixes) == 0
    assert len(several.rank._suffixes) == 1


@pytest.mark.parametrize(
    ("config", "count", "said"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 2}, 4, "its 2 KV heads .* among 4 ranks"),
        ({"num_attention_heads": 30, "num_key_value_heads": 30}, 4, "its 30 attention heads .* among 4 ranks"),
        ({"num_attention_heads": 8}, 3, "its 8 attention heads .* among 3 ranks"),
        ({"num_attention_heads": 8, "num_kv_heads": 1}, 2, "its 1 KV heads .* among 2 ranks"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused_with_their_number(
    config: dict[str, int], count: int, said: str
) -> None:
    with pytest.raises(ModelUnsupported, match=said):
        check_heads("model", config, count)


def test_a_process_is_pinned_to_its_card_and_never_to_another_than_the_operators() -> None:
    empty: dict[str, str] = {}
    pin_cards("", 2, empty)
    assert empty == {}
    pin_cards("1, 3", 2, empty)
    assert empty == {"CUDA_VISIBLE_DEVICES": "1", "MUSA_VISIBLE_DEVICES": "1"}
    agreeing = {"CUDA_VISIBLE_DEVICES": "2"}
    pin_cards("2", 1, agreeing)
    assert agreeing["MUSA_VISIBLE_DEVICES"] == "2"
    with pytest.raises(CardsConflict, match=r"PLATEMAKER_CARDS is '0', and MUSA_VISIBLE_DEVICES is '1'"):
        pin_cards("0", 1, {"MUSA_VISIBLE_DEVICES": "1"})
    with pytest.raises(CardsConflict, match="names 2 cards, and PLATEMAKER_TENSOR_PARALLEL is 1"):
        pin_cards("0,1", 1, {})


@pytest.mark.parametrize(
    ("cards", "given", "expected"), [("4,6", "", "6"), ("", "2,5", "5"), ("", "", "1"), ("4,6", "4,6", "6")]
)
def test_another_rank_sees_its_own_card_only(cards: str, given: str, expected: str) -> None:
    environment = rank_environment(cards, 1, {"CUDA_VISIBLE_DEVICES": given})

    assert environment["CUDA_VISIBLE_DEVICES"] == expected
