import gc
import logging
import weakref
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.decode import Decoder, DecodeRequest, DecodeResult
from kernels.errors import AnswerTooLarge, BatchTooLarge
from kernels.halving import answer_all
from kernels.kv import PrefixKV
from kernels.model import Asked, LanguageModel
from kernels.out_of_memory import is_out_of_memory
from kernels.params import GenerationParams
from kernels.prefill import chunk_stops, prefill
from kernels.prompt import Prompter
from tests.kernels.test_decode import FakePrompter, random_ids

PARAMS = GenerationParams(max_new_tokens=6, ignore_eos=True, temperature=1.0)
ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] data. DefaultCPUAllocator: can't allocate memory: you tried ..."),
    RuntimeError("MUSA out of memory. Tried to allocate 2.00 MiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.fixture(scope="module")
def document(tiny_llama: LanguageModel, seed: int) -> PrefixKV:
    ids = random_ids(40, torch.Generator().manual_seed(seed))
    return prefill(tiny_llama, ids, stops=chunk_stops(40, 0, 32)).kv


@pytest.fixture
def requests(document: PrefixKV, generator: torch.Generator) -> list[DecodeRequest]:
    return [DecodeRequest(key, random_ids(3 + key % 5, generator), PARAMS, document) for key in range(13)]


class Cramped:
    """Decoders on a device with memory for so many questions at a time, and for none that is longer than `longest`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: LanguageModel, room: int, longest: int = 99) -> None:
        self.tried: list[int] = []
        self.made: list[weakref.ref[Decoder]] = []
        self.still_held: list[weakref.ref[Decoder]] = []
        self.error: Exception = MemoryError()
        honest = model.ask_all

        def ask_all(documents: Iterable[Asked], **how: bool) -> Tensor:
            documents = list(documents)
            pending = [tokens for document in documents for tokens in document.pending]
            if len(pending) > room or any(len(tokens) > longest for tokens in pending):
                raise type(self.error)(*self.error.args)  # a fresh one: errors hold the frames they came through
            return honest(documents, **how)

        monkeypatch.setattr(model, "ask_all", ask_all)
        self.model = model

    def __call__(self, max_batch: int) -> Decoder:
        self.tried.append(max_batch)
        self.still_held = [decoder for decoder in self.made if decoder() is not None]
        prompter: Prompter = FakePrompter()  # type: ignore[assignment]
        decoder = Decoder(self.model, prompter, max_batch=max_batch)
        self.made.append(weakref.ref(decoder))
        return decoder


def answers(cramped: Cramped, requests: list[DecodeRequest], max_batch: int = 8) -> dict[int, DecodeResult]:
    results = list(answer_all(cramped, iter(requests), lambda _key: False, max_batch=max_batch))
    assert len(results) == len({result.key for result in results})
    return {result.key: result for result in results}


@pytest.mark.parametrize("error", ERRORS, ids=[str(error)[:20] for error in ERRORS])
def test_every_kind_of_error_is_told(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_the_batch_is_halved_until_it_fits_and_the_answers_are_the_same(
    tiny_llama: LanguageModel,
    document: PrefixKV,
    requests: list[DecodeRequest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = {
        key: result.token_ids for key, result in answers(Cramped(monkeypatch, tiny_llama, room=99), requests).items()
    }
    cramped = Cramped(monkeypatch, tiny_llama, room=3)

    with caplog.at_level(logging.WARNING):
        found = answers(cramped, requests)

    assert {key: result.token_ids for key, result in found.items()} == expected
    assert cramped.tried == [8, 4, 2]
    assert [record.message for record in caplog.records] == [
        f"not enough memory for {many} questions at a time: going on with {few}" for many, few in ((8, 4), (4, 2))
    ]


def test_a_question_too_large_alone_fails_in_one_sentence_and_the_others_are_answered(
    tiny_llama: LanguageModel, document: PrefixKV, requests: list[DecodeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests[4] = DecodeRequest(4, [5] * 20, PARAMS, document)
    cramped = Cramped(monkeypatch, tiny_llama, room=5, longest=19)

    results = answers(cramped, requests)

    failed = results.pop(4)
    assert isinstance(failed.error, AnswerTooLarge)
    assert "(20 tokens, and up to 6 of the answer" in str(failed.error)
    assert {result.finish for result in results.values()} == {"length"}
    assert len(results) == 12
    assert cramped.tried == [8, 4, 2, 1, 8, 4]


def test_memory_is_given_back_before_the_next_try(
    tiny_llama: LanguageModel, document: PrefixKV, requests: list[DecodeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    cramped = Cramped(monkeypatch, tiny_llama, room=1)
    gc.disable()
    try:
        answers(cramped, requests[:4])
    finally:
        gc.enable()

    assert len(cramped.made) > 2
    assert not cramped.still_held


def test_requests_are_drawn_no_earlier_and_each_once(
    tiny_llama: LanguageModel, document: PrefixKV, requests: list[DecodeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def drawing() -> Iterator[DecodeRequest]:
        for request in requests:
            drawn.append(request.key)
            yield request

    results = answer_all(Cramped(monkeypatch, tiny_llama, room=1), drawing(), lambda _key: False, max_batch=4)
    next(results)
    early = list(drawn)
    rest = list(results)

    assert early == [0, 1, 2, 3]
    assert len(rest) == 12
    assert drawn == list(range(13))


def test_what_was_cancelled_meanwhile_is_not_begun_again(
    tiny_llama: LanguageModel, document: PrefixKV, requests: list[DecodeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def is_cancelled(key: int) -> bool:
        asked.append(key)
        return key == 1 and len(asked) > 4

    cramped = Cramped(monkeypatch, tiny_llama, room=2)
    results = {each.key: each for each in answer_all(cramped, iter(requests), is_cancelled, max_batch=4)}

    assert results[1].finish == "cancelled"
    assert {result.finish for key, result in results.items() if key != 1} == {"length"}


def test_another_error_is_not_taken_for_one_of_memory(
    tiny_llama: LanguageModel, document: PrefixKV, requests: list[DecodeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    cramped = Cramped(monkeypatch, tiny_llama, room=0)
    cramped.error = RuntimeError("the size of tensor a must match")

    with pytest.raises(RuntimeError, match="must match"):
        answers(cramped, requests)
    assert cramped.tried == [8]


def test_a_decoder_out_of_memory_names_what_was_under_way(
    tiny_llama: LanguageModel, document: PrefixKV, requests: list[DecodeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Cramped(monkeypatch, tiny_llama, room=0)(2)

    with pytest.raises(BatchTooLarge, match="2 questions at a time") as caught:
        list(decoder.run(requests))

    assert caught.value.requests == requests[:2]


def test_really_too_much_memory_is_told_from_the_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)

    assert is_out_of_memory(caught.value)
