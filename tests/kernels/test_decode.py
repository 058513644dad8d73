from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import decode
from kernels.decode import Decoder, DecodeRequest, DecodeResult
from kernels.errors import ContextExceeded, NonFiniteLogits
from kernels.kv import PrefixKV, SuffixKV
from kernels.model import Asked, LanguageModel
from kernels.params import GenerationParams
from kernels.prefill import chunk_stops, prefill

LENGTH = 12
GREEDY = GenerationParams(max_new_tokens=LENGTH, ignore_eos=True)


class FakePrompter:
    """Writes token 7 as "7,"."""

    def __init__(self, stop_ids: Iterable[int] = ()) -> None:
        self.stop_ids = frozenset(stop_ids)

    def text(self, ids: list[int]) -> str:
        return "".join(f"{token}," for token in ids)


def random_ids(count: int, generator: torch.Generator) -> list[int]:
    ids: list[int] = torch.randint(3, 96, (count,), generator=generator).tolist()
    return ids


@pytest.fixture(scope="module")
def prefix(tiny_llama: LanguageModel, seed: int) -> PrefixKV:
    ids = random_ids(60, torch.Generator().manual_seed(seed))
    return prefill(tiny_llama, ids, stops=chunk_stops(60, 0, 32)).kv


@pytest.fixture
def questions(generator: torch.Generator) -> list[list[int]]:
    return [random_ids(count, generator) for count in (3, 17, 1, 9, 5, 12, 2, 8, 4, 11, 6)]


class OneDocument(Decoder):
    """With the document that is asked about."""

    def __init__(self, model: LanguageModel, prefix: PrefixKV, *, max_batch: int) -> None:
        super().__init__(model, FakePrompter(), max_batch=max_batch)  # type: ignore[arg-type]
        self.prefix = prefix


@pytest.fixture
def decoder(tiny_llama: LanguageModel, prefix: PrefixKV) -> OneDocument:
    return OneDocument(tiny_llama, prefix, max_batch=3)


def run(
    decoder: OneDocument, questions: list[list[int]], params: GenerationParams = GREEDY, **how: Any
) -> dict[int, DecodeResult]:
    requests = [DecodeRequest(key, question, params, decoder.prefix) for key, question in enumerate(questions)]
    return {result.key: result for result in decoder.run(requests, **how)}


def tokens(results: dict[int, DecodeResult]) -> dict[int, tuple[int, ...]]:
    return {key: result.token_ids for key, result in results.items()}


@pytest.fixture
def alone(tiny_llama: LanguageModel, prefix: PrefixKV, questions: list[list[int]]) -> dict[int, tuple[int, ...]]:
    """The greedy answer of each question, without any other."""
    answers = {}
    for key, question in enumerate(questions):
        decoder = OneDocument(tiny_llama, prefix, max_batch=1)
        (result,) = decoder.run([DecodeRequest(key, question, GREEDY, prefix)])
        answers[key] = result.token_ids
    return answers


def test_more_questions_than_room_are_all_answered_as_if_alone(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]]
) -> None:
    results = run(decoder, questions)

    assert tokens(results) == alone
    for key, result in results.items():
        assert result.finish == "length"
        assert result.error is None
        assert result.question_tokens == len(questions[key])
        assert 0 < result.first_token_s <= result.total_s


@pytest.mark.parametrize("max_batch", [2, 3, 5])
def test_answers_that_end_at_different_times_do_not_disturb_the_others(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]], max_batch: int
) -> None:
    lengths = [5, 1, 9, 12, 2, 7, 1, 10, 3, 12, 4]
    requests = [
        DecodeRequest(key, question, GenerationParams(max_new_tokens=length, ignore_eos=True), decoder.prefix)
        for key, (question, length) in enumerate(zip(questions, lengths, strict=True))
    ]
    decoder = OneDocument(decoder.model, decoder.prefix, max_batch=max_batch)

    results = {result.key: result for result in decoder.run(requests)}

    assert tokens(results) == {key: alone[key][:length] for key, length in enumerate(lengths)}


def test_questions_are_drawn_only_when_there_is_room(decoder: OneDocument, questions: list[list[int]]) -> None:
    drawn, finished = 0, 0

    def draw() -> Iterator[DecodeRequest]:
        nonlocal drawn
        for key, question in enumerate(questions):
            assert drawn - finished < decoder.max_batch
            drawn += 1
            # Answers of many lengths, so that they end at different times.
            params = GenerationParams(max_new_tokens=1 + key % 5, ignore_eos=True)
            yield DecodeRequest(key, question, params, decoder.prefix)

    for result in decoder.run(draw()):
        finished += 1
        assert len(result.token_ids) == 1 + result.key % 5

    assert drawn == finished == len(questions)


def test_few_question_tokens_are_taken_up_in_one_step(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "ADMIT_TOKENS", 4)
    honest, widths = decoder.model.ask_all, []

    def watched(asked: list[Asked], *, every: bool) -> Tensor:
        widths.append(sum(length > 1 for length in (len(r.pending) for d in decoder._documents for r in d.running)))
        return honest(asked, every=every)

    monkeypatch.setattr(decoder.model, "ask_all", watched)

    assert tokens(run(decoder, questions)) == alone
    assert max(widths) <= 2  # questions of 3 and 17 tokens: 4 tokens of room are used up by the second


def test_eos_ends_an_answer_and_is_no_part_of_it(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]]
) -> None:
    eos = alone[1][4]
    decoder.prompter = FakePrompter([eos])  # type: ignore[assignment]

    results = run(decoder, questions, GenerationParams(max_new_tokens=LENGTH))

    for key, result in results.items():
        expected = alone[key]
        assert result.token_ids == (expected[: expected.index(eos)] if eos in expected else expected)
        assert result.finish == ("stop" if eos in expected else "length")


def test_eos_as_the_first_token_gives_an_empty_answer(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]]
) -> None:
    decoder.prompter = FakePrompter([alone[0][0]])  # type: ignore[assignment]

    result = run(decoder, questions[:1], GenerationParams(max_new_tokens=LENGTH))[0]

    assert (result.text, result.token_ids, result.finish) == ("", (), "stop")


def test_ignore_eos_goes_on_to_the_length(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]]
) -> None:
    decoder.prompter = FakePrompter(range(96))  # type: ignore[assignment]

    assert tokens(run(decoder, questions)) == alone


@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_new_tokens_is_exact(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]], count: int
) -> None:
    results = run(decoder, questions, GenerationParams(max_new_tokens=count, ignore_eos=True))

    assert tokens(results) == {key: answer[:count] for key, answer in alone.items()}
    assert {result.finish for result in results.values()} == {"length"}


def test_a_stop_string_ends_the_answer_and_cuts_the_text_before_it(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]]
) -> None:
    whole = decoder.prompter.text(list(alone[0]))
    # From the middle of one token to the middle of another; the other one never comes.
    stop = decoder.prompter.text(list(alone[0][3:5]))[1:-1]

    result = run(
        decoder, questions[:1], GenerationParams(max_new_tokens=LENGTH, ignore_eos=True, stop=("never", stop))
    )[0]

    assert result.finish == "stop"
    assert result.text == whole[: whole.index(stop)]
    assert stop in decoder.prompter.text(list(result.token_ids))
    assert stop not in decoder.prompter.text(list(result.token_ids[:-1]))


def test_a_stop_string_counts_only_behind_the_least_answer(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]]
) -> None:
    for least in (0, 1, 5, LENGTH - 1):
        params = GenerationParams(max_new_tokens=LENGTH, ignore_eos=True, stop=(",",), min_new_tokens=least)

        result = run(decoder, questions[:1], params)[0]

        assert result.token_ids == alone[0][: least + 1]
        assert result.text == decoder.prompter.text(list(alone[0][: least + 1])).removesuffix(",")
        assert result.finish == "stop"


def test_the_earliest_of_several_stop_strings_counts(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]]
) -> None:
    first, second = str(alone[0][0]), f",{alone[0][1]}"

    result = run(
        decoder, questions[:1], GenerationParams(max_new_tokens=LENGTH, ignore_eos=True, stop=(second, first))
    )[0]

    assert (result.text, result.finish) == ("", "stop")


def test_a_cancelled_question_is_dropped_and_no_other(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def is_cancelled(key: int) -> bool:
        nonlocal asked
        asked += key == 1
        return key == 1 and asked > 3

    results = run(decoder, questions, is_cancelled=is_cancelled)

    cancelled = results.pop(1)
    assert cancelled.finish == "cancelled"
    assert 0 < len(cancelled.token_ids) < LENGTH
    assert cancelled.token_ids == alone.pop(1)[: len(cancelled.token_ids)]
    assert tokens(results) == alone


def test_a_question_too_long_for_the_context_is_an_error_and_the_others_go_on(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]], generator: torch.Generator
) -> None:
    room = decoder.model.context_len - decoder.prefix.length - LENGTH
    questions[4] = random_ids(room + 1, generator)

    results = run(decoder, questions)

    failed = results.pop(4)
    assert failed.finish == "error"
    assert isinstance(failed.error, ContextExceeded)
    assert (failed.error.needed, failed.error.context_len) == (257, 256)
    del alone[4]
    assert tokens(results) == alone


def test_a_question_that_just_fits_the_context_is_answered(decoder: OneDocument, generator: torch.Generator) -> None:
    room = decoder.model.context_len - decoder.prefix.length - LENGTH

    assert len(run(decoder, [random_ids(room, generator)])[0].token_ids) == LENGTH


def test_a_model_that_overflows_for_one_question_fails_that_one_only(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, steps = decoder.model.ask_all, 0

    def overflowing(asked: list[Asked], *, every: bool) -> Tensor:
        """In the third step the second question's keys, values and logits become NaN."""
        nonlocal steps
        logits = honest(asked, every=every).clone()
        steps += 1
        if steps == 3:
            logits[1] = float("nan")
            with torch.inference_mode():
                for part in (decoder._documents[0].suffix.keys, decoder._documents[0].suffix.values):
                    for tensor in part.values():
                        tensor[1] = float("nan")
        return logits

    monkeypatch.setattr(decoder.model, "ask_all", overflowing)

    results = run(decoder, questions)

    failed = results.pop(1)
    assert (failed.finish, type(failed.error)) == ("error", NonFiniteLogits)
    assert failed.token_ids == alone.pop(1)[:2]
    # Its place in the batch is taken by others afterwards, which must not see what it left there.
    assert tokens(results) == alone


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_is_an_error_wherever_it_stands(
    decoder: OneDocument, questions: list[list[int]], bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = decoder.model.ask_all

    def broken(asked: list[Asked], *, every: bool) -> Tensor:
        logits = honest(asked, every=every).clone()
        logits[:, 50] = bad
        return logits

    monkeypatch.setattr(decoder.model, "ask_all", broken)

    assert all(isinstance(result.error, NonFiniteLogits) for result in run(decoder, questions).values())


def sampled(seed: int) -> GenerationParams:
    return GenerationParams(max_new_tokens=LENGTH, ignore_eos=True, temperature=2.0, seed=seed)


def test_the_same_seed_gives_the_same_answer_in_any_batch_and_order(
    tiny_llama: LanguageModel, prefix: PrefixKV, questions: list[list[int]]
) -> None:
    requests = [DecodeRequest(key, question, sampled(key), prefix) for key, question in enumerate(questions)]

    answers = []
    for max_batch, order in ((1, requests), (3, requests), (8, requests[::-1]), (2, requests[::2] + requests[1::2])):
        decoder = OneDocument(tiny_llama, prefix, max_batch=max_batch)
        answers.append({result.key: result.token_ids for result in decoder.run(order)})

    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_another_seed_gives_another_answer(decoder: OneDocument, questions: list[list[int]]) -> None:
    same, other = (run(decoder, [questions[0]] * 2, sampled(seed)) for seed in (1, 2))

    assert same[0].token_ids == same[1].token_ids
    assert same[0].token_ids != other[0].token_ids


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0, "seed": 5, "top_p": 0.3, "top_k": 7},
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 1.5, "top_p": 1e-9},
    ],
    ids=["temperature 0", "top_k 1", "top_p 0"],
)
def test_sampling_that_leaves_one_choice_is_greedy(
    decoder: OneDocument, questions: list[list[int]], alone: dict[int, tuple[int, ...]], how: dict[str, Any]
) -> None:
    params = GenerationParams(max_new_tokens=LENGTH, ignore_eos=True, **how)

    assert tokens(run(decoder, questions, params)) == alone


def test_the_memory_of_a_question_does_not_depend_on_the_document(
    tiny_llama: LanguageModel,
    questions: list[list[int]],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[SuffixKV] = []
    new_suffix = tiny_llama.new_suffix

    def watched(slots: int, capacity: int) -> SuffixKV:
        made.append(new_suffix(slots, capacity))
        return made[-1]

    monkeypatch.setattr(tiny_llama, "new_suffix", watched)
    sizes = []
    for length in (20, 160):
        document = prefill(tiny_llama, random_ids(length, generator), stops=chunk_stops(length, 0, 64)).kv
        made.clear()
        run(OneDocument(tiny_llama, document, max_batch=4), questions)
        sizes.append(max(suffix.size_bytes for suffix in made))

    layers, kv_heads, head_dim, float32 = 2, 2, 8, 4
    longest = max(len(question) for question in questions) + LENGTH
    assert sizes == [2 * layers * 4 * kv_heads * longest * head_dim * float32] * 2


def test_the_documents_kv_is_neither_copied_nor_changed(decoder: OneDocument, questions: list[list[int]]) -> None:
    parts = (decoder.prefix.keys, decoder.prefix.values)
    places = [tensor.data_ptr() for part in parts for tensor in part.values()]
    content = [tensor.clone() for part in parts for tensor in part.values()]
    size = decoder.prefix.size_bytes

    run(decoder, questions)

    after = [tensor for part in parts for tensor in part.values()]
    assert [tensor.data_ptr() for tensor in after] == places
    assert all(torch.equal(old, new) for old, new in zip(content, after, strict=True))
    assert decoder.prefix.size_bytes == size


def test_nothing_is_asked_of_the_model_where_nothing_is_asked(decoder: OneDocument) -> None:
    assert list(decoder.run([])) == []


@pytest.mark.parametrize("max_batch", [2, 5, 16])
def test_questions_of_several_documents_are_answered_together_as_if_alone(
    tiny_llama: LanguageModel, questions: list[list[int]], generator: torch.Generator, max_batch: int
) -> None:
    documents = [
        prefill(tiny_llama, random_ids(length, generator), stops=chunk_stops(length, 0, 32)).kv
        for length in (40, 3, 90)
    ]
    requests = [
        DecodeRequest(key, question, GenerationParams(max_new_tokens=2 + key * 5 % 11, ignore_eos=True), kv)
        for key, (question, kv) in enumerate(zip(questions, documents * 4, strict=False))
    ]
    alone = {}
    for request in requests:
        (result,) = OneDocument(tiny_llama, request.prefix, max_batch=1).run([request])
        alone[request.key] = result.token_ids
    decoder = OneDocument(tiny_llama, documents[0], max_batch=max_batch)

    results = {result.key: result.token_ids for result in decoder.run(iter(requests))}

    assert results == alone
    assert not decoder._documents  # none is held on to
