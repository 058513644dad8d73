"""Answers of a wanted form, from random scores over the tokens of single bytes: any fault of a mask is soon drawn."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kernels.constraint import Grammars
from kernels.errors import ConstraintFailed, ConstraintRefused, KernelError, ParamsRefused
from kernels.grammar import grammar_of
from kernels.params import GenerationParams
from kernels.prompt import Prompter
from kernels.sampling import Drawn, Sampler, draw

LONGEST = 400
CHOICES = (
    "Yes",
    "No",
    "Not stated",
    "Nein, größer als 5 €",
    "永不",
    "🖋",
    'a "quoted" \\ word',
    "tab\tand\nline",
    "\x7f",
)
PATTERNS = [
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"(EUR|USD|€) [1-9][0-9]{0,2}(,[0-9]{3}){0,3}(\.[0-9]{2})?",
    r"(ä|ö|永|🖋|x){1,12}",
    r"[^a]{3}",
    r" padded ",
    r"[Α-Ωα-ω]{2,5}|[a-c]{1,3}\n?",
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "amount": {"type": "integer", "minimum": -50, "maximum": 1000},
        "currency": {"enum": ["EUR", "€", None]},
        "notice": {"type": "string", "maxLength": 12},
        "parties": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["amount", "currency", "notice", "parties"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def prompter(tiny_model: Path) -> Prompter:
    return Prompter(tiny_model, "Answer.")


def answer(prompter: Prompter, params: GenerationParams, generator: torch.Generator) -> tuple[str, list[int]]:
    """Draws from random scores until the answer ends."""
    constraint = prompter.grammars.start(params)
    sampler = Sampler(params, [1], stop_ids=prompter.stop_ids, constraint=constraint)
    vocab = len(prompter.tokenizer) + 3  # models have more rows than their tokenizers have tokens
    ids: list[int] = []
    while not sampler.is_complete:
        logits = torch.randn(1, vocab, generator=generator)
        logits[:, vocab - 3 :] += 100
        (drawn,) = draw(logits, [sampler])
        assert isinstance(drawn, Drawn), drawn
        if drawn.token in sampler.ending:
            break
        ids.append(drawn.token)
        assert len(ids) < LONGEST
    return constraint.text(ids), ids


def sampled_and_greedy(**constraint: Any) -> list[GenerationParams]:
    return [
        GenerationParams(**constraint),
        GenerationParams(temperature=1.0, seed=3, **constraint),
        GenerationParams(repetition_penalty=1.5, min_p=0.01, temperature=2.0, **constraint),
    ]


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_answer_matches_its_regex(prompter: Prompter, pattern: str, kind: int, generator: torch.Generator) -> None:
    params = sampled_and_greedy(regex=pattern)[kind]

    for _ in range(5):
        text, ids = answer(prompter, params, generator)

        assert re.fullmatch(pattern, text)
        assert prompter.text(ids) == text


@pytest.mark.parametrize("kind", range(3))
def test_an_answer_is_one_of_its_choices(prompter: Prompter, kind: int, generator: torch.Generator) -> None:
    params = sampled_and_greedy(choices=CHOICES)[kind]

    assert all(answer(prompter, params, generator)[0] in CHOICES for _ in range(15))


@pytest.mark.parametrize("kind", range(3))
def test_an_answer_parses_and_fits_its_schema(prompter: Prompter, kind: int, generator: torch.Generator) -> None:
    params = sampled_and_greedy(json_schema=json.dumps(SCHEMA))[kind]

    for _ in range(3):
        value = json.loads(answer(prompter, params, generator)[0])

        assert set(SCHEMA["required"]) <= set(value) <= set(SCHEMA["properties"])
        assert type(value["amount"]) is int and -50 <= value["amount"] <= 1000
        assert value["currency"] in SCHEMA["properties"]["currency"]["enum"]
        assert isinstance(value["notice"], str) and len(value["notice"]) <= 12
        assert 1 <= len(value["parties"]) <= 3 and all(len(party) <= 5 for party in value["parties"])
        assert isinstance(value.get("open", True), bool)


def test_a_greedy_answer_takes_the_likeliest_token_that_a_choice_allows(
    prompter: Prompter, generator: torch.Generator
) -> None:
    """The allowed tokens by hand: a byte each, and the end where a choice is whole."""
    byte_of = {token: prompter.tokenizer.convert_ids_to_tokens(token) for token in range(258)}
    encoded = {choice: prompter.tokenizer.encode(choice, add_special_tokens=False) for choice in CHOICES}
    params = GenerationParams(choices=CHOICES)
    sampler = Sampler(params, [1], stop_ids=prompter.stop_ids, constraint=prompter.grammars.start(params))
    ids: list[int] = []
    while not sampler.is_complete:
        logits = torch.randn(1, len(byte_of), generator=generator)
        following = {way[len(ids)] for way in encoded.values() if way[: len(ids)] == ids and len(way) > len(ids)}
        allowed = sorted(following | (set(prompter.stop_ids) if ids in encoded.values() else set()))
        expected = allowed[int(logits[0, allowed].argmax())]

        (drawn,) = draw(logits, [sampler])

        assert isinstance(drawn, Drawn)
        assert drawn.token == expected
        if drawn.token in prompter.stop_ids:
            break
        ids.append(drawn.token)
    assert ids in encoded.values()


@pytest.mark.parametrize("how", [{"min_new_tokens": 4}, {"ignore_eos": True}], ids=str)
def test_an_answer_that_may_not_end_yet_grows_as_far_as_its_form_allows(
    prompter: Prompter, how: dict[str, Any], generator: torch.Generator
) -> None:
    for form, longest in (({"regex": "a{1,6}"}, 6), ({"choices": ("ab", "a", "abc")}, 3)):
        _, ids = answer(prompter, GenerationParams(**form, **how), generator)  # type: ignore[arg-type]

        assert min(4, longest) <= len(ids) <= longest
        assert "ignore_eos" not in how or len(ids) == longest


def test_an_answer_that_has_to_be_empty_is(prompter: Prompter, generator: torch.Generator) -> None:
    assert answer(prompter, GenerationParams(regex="", min_new_tokens=3), generator) == ("", [])


def test_a_grammar_is_compiled_once_and_answers_do_not_share_their_place(prompter: Prompter) -> None:
    grammars = Grammars(prompter.tokenizer, prompter.stop_ids)
    params = GenerationParams(choices=("ab", "cd"))

    first, second = grammars.start(params), grammars.start(params)
    first.accept(prompter.tokenizer.encode("a", add_special_tokens=False)[0])
    logits = torch.zeros(len(prompter.tokenizer))
    second.mask(logits, may_end=True)

    assert prompter.text(logits.isfinite().nonzero().flatten().tolist()) in ("ac", "ca")
    assert grammars._compiled.cache_info().misses == 1


REFUSED = [
    ({"regex": "[a-z"}, "regex cannot be used: unclosed character class."),
    ({"regex": "a(?=b)"}, "regex cannot be used: look-around"),
    ({"regex": r"(a)\1"}, "regex cannot be used: backreferences are not supported."),
    ({"json_schema": "{"}, "json_schema cannot be used: it is not JSON."),
    ({"json_schema": '{"minimum": NaN}'}, "json_schema cannot be used: it is not JSON."),
    ({"json_schema": "7"}, "json_schema cannot be used: it is not a JSON object."),
    ({"json_schema": '{"type": "foo"}'}, "json_schema cannot be used: Invalid type: foo."),
    ({"json_schema": '{"not": {}}'}, "json_schema cannot be used: these keys cannot be enforced"),
    ({"json_schema": '{"$ref": "https://example.com/x"}'}, "json_schema cannot be used: Resource"),
]


@pytest.mark.parametrize(("form", "reason"), REFUSED, ids=[str(form) for form, _ in REFUSED])
def test_a_form_that_cannot_be_enforced_is_refused_in_one_sentence(form: dict[str, str], reason: str) -> None:
    with pytest.raises(ConstraintRefused) as caught:
        grammar_of(GenerationParams(**form))  # type: ignore[arg-type]

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_form_that_the_models_tokens_cannot_write_ends_the_answer(prompter: Prompter) -> None:
    made = json.loads(prompter.tokenizer.backend_tokenizer.to_str())
    del made["model"]["vocab"]["b"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), eos_token=prompter.tokenizer.eos_token
    )
    grammars = Grammars(tokenizer, prompter.stop_ids)

    constraint = grammars.start(GenerationParams(regex="ab"))
    with pytest.raises(ConstraintFailed, match="After 1 tokens"):
        constraint.accept(tokenizer.encode("a", add_special_tokens=False)[0])


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    with pytest.raises(ConstraintRefused, match=r"tokenizer\.json"):
        Grammars(object(), frozenset([1]))


WRONG_PARAMS = [
    ({"max_new_tokens": 0}, "max_new_tokens: .*greater than or equal to 1"),
    ({"temperature": -0.1}, "temperature: .*greater than or equal to 0"),
    ({"temperature": float("nan")}, "temperature: .*finite"),
    ({"top_p": 0.0}, "top_p: .*greater than 0"),
    ({"top_p": 1.1}, "top_p: .*less than or equal to 1"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"logprobs": 21}, "logprobs: .*less than or equal to 20"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, more than the 8 of max_new_tokens"),
    ({"choices": ["a"], "regex": "a"}, "only one of"),
    ({"regex": "a", "stop": ["b"]}, "ends by itself"),
    ({"temprature": 1.0}, "temprature: Unexpected keyword argument"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_PARAMS, ids=[str(wrong) for wrong, _ in WRONG_PARAMS])
def test_wrong_numbers_are_refused_in_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ParamsRefused, match=sentence) as caught:
        GenerationParams.checked(**wrong)

    assert isinstance(caught.value, KernelError)
    assert "\n" not in str(caught.value)
