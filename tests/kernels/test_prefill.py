"""Where chunks end, where reading may go on, and what a probe proves."""

from dataclasses import replace

import pytest
import torch

from kernels.errors import ContextExceeded, ProbeMismatch
from kernels.fidelity import measure_loss
from kernels.kv import PrefixKV
from kernels.model import LanguageModel
from kernels.prefill import Probe, check_probe, chunk_stops, prefill


@pytest.fixture
def ids(generator: torch.Generator) -> list[int]:
    drawn: list[int] = torch.randint(3, 96, (60,), generator=generator).tolist()
    return drawn


@pytest.mark.parametrize(
    ("num_tokens", "head_tokens", "chunk_tokens", "expected"),
    [
        (60, 0, 20, (20, 40, 60)),
        (61, 0, 20, (20, 40, 60, 61)),
        (5, 0, 20, (5,)),
        (60, 7, 20, (7, 20, 40, 60)),
        (60, 40, 20, (20, 40, 60)),
        (60, 60, 100, (60,)),
    ],
)
def test_chunks_end_behind_the_head_and_at_their_size(
    num_tokens: int, head_tokens: int, chunk_tokens: int, expected: tuple[int, ...]
) -> None:
    assert chunk_stops(num_tokens, head_tokens, chunk_tokens) == expected


def test_chunks_are_told_as_the_stops_cut_them(tiny_llama: LanguageModel, ids: list[int]) -> None:
    told: list[tuple[int, int, int]] = []

    prefill(tiny_llama, ids, stops=[7, 8, 60], on_chunk=lambda kv, start, stop: told.append((start, stop, kv.length)))

    assert told == [(0, 7, 7), (7, 8, 8), (8, 60, 60)]


@pytest.mark.parametrize("stops", [[], [0, 60], [30], [30, 30, 60], [40, 30, 60], [61]])
def test_stops_that_do_not_end_the_document_in_order_are_an_error(
    stops: list[int], tiny_llama: LanguageModel, ids: list[int]
) -> None:
    with pytest.raises(ValueError, match="stops"):
        prefill(tiny_llama, ids, stops=stops)


def test_reading_goes_on_only_at_a_stop(tiny_llama: LanguageModel, ids: list[int]) -> None:
    kv = prefill(tiny_llama, ids, stops=[60]).kv
    kv.length = 30

    with pytest.raises(ValueError, match="not one of the stops"):
        prefill(tiny_llama, ids, stops=[20, 60], kv=kv)


def test_the_last_chunk_is_always_computed(tiny_llama: LanguageModel, ids: list[int]) -> None:
    whole = prefill(tiny_llama, ids, stops=[20, 40, 60])

    again = prefill(tiny_llama, ids, stops=[20, 40, 60], kv=whole.kv)

    assert again.computed_tokens == 20
    assert again.probe == whole.probe


def test_a_document_that_leaves_no_room_for_a_token_is_refused(tiny_llama: LanguageModel) -> None:
    with pytest.raises(ContextExceeded):
        prefill(tiny_llama, [5] * 256, stops=[256])


def test_a_kv_that_is_whole_passes_its_probe(tiny_llama: LanguageModel, ids: list[int]) -> None:
    done = prefill(tiny_llama, ids, stops=[60])

    check_probe(tiny_llama, ids[-1], done.kv, done.probe)


@pytest.mark.parametrize("damage", ["another document", "values in another order", "one token short", "another token"])
def test_a_kv_that_is_not_what_was_read_fails_the_probe(damage: str, tiny_llama: LanguageModel, ids: list[int]) -> None:
    done = prefill(tiny_llama, ids, stops=[60])
    kv, last = done.kv, ids[-1]
    if damage == "another document":
        kv = prefill(tiny_llama, ids[::-1], stops=[60]).kv
    elif damage == "values in another order":
        with torch.inference_mode():
            kv.values[0].copy_(kv.values[0].flip(1))
    elif damage == "one token short":
        kv = replace(kv, length=59)
    else:
        last = ids[-1] - 1

    with pytest.raises(ProbeMismatch, match="has to be read again"):
        check_probe(tiny_llama, last, kv, done.probe)


@pytest.mark.parametrize(
    "probe",
    [Probe((), ()), Probe((1, 2), (1.0,)), Probe((96,), (1.0,)), Probe((-1,), (1.0,)), Probe((1,), (float("nan"),))],
)
def test_a_probe_that_is_none_proves_nothing(probe: Probe, tiny_llama: LanguageModel, ids: list[int]) -> None:
    kv = prefill(tiny_llama, ids, stops=[60]).kv

    with pytest.raises(ProbeMismatch):
        check_probe(tiny_llama, ids[-1], kv, probe)


def test_another_best_token_fails_even_where_the_probed_ones_agree(tiny_llama: LanguageModel, ids: list[int]) -> None:
    done = prefill(tiny_llama, ids, stops=[60])
    worse = Probe(done.probe.token_ids[1:], done.probe.logits[1:])

    with pytest.raises(ProbeMismatch):
        check_probe(tiny_llama, ids[-1], done.kv, worse)


def test_the_loss_of_an_exact_copy_is_none_and_its_probe_the_same(tiny_llama: LanguageModel, ids: list[int]) -> None:
    done = prefill(tiny_llama, ids, stops=[40, 60])

    loss = measure_loss(tiny_llama, ids, exact=done.kv, stored=done.kv, first=40)

    assert (loss.logit_rel_error, loss.top1_agreement, loss.probe) == (0, 1, done.probe)


def test_the_probe_of_a_lossy_copy_is_what_the_copy_does(tiny_llama: LanguageModel, ids: list[int]) -> None:
    done = prefill(tiny_llama, ids, stops=[40, 60])
    rounded = PrefixKV(
        60,
        60,
        {layer: tensor.to(torch.float8_e4m3fn).float() for layer, tensor in done.kv.keys.items()},
        done.kv.values,
    )

    loss = measure_loss(tiny_llama, ids, exact=done.kv, stored=rounded, first=40)

    assert loss.logit_rel_error > 0
    check_probe(tiny_llama, ids[-1], rounded, loss.probe)
    with pytest.raises(ProbeMismatch):
        check_probe(tiny_llama, ids[-1], done.kv, loss.probe)
