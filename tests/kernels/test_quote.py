"""Quotes from random scores: whatever is drawn is a span of the document, with its place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kernels.params import GenerationParams
from kernels.phrases import MOST_QUOTE_TOKENS, NONE
from kernels.prompt import Prompter
from kernels.quote import LEAST_TOKENS, Quote, QuoteIndex
from kernels.sampling import Drawn, Sampler, draw
from kernels.words import WORD

ENGLISH = "Article 1. The Supplier shall pay EUR 2,500,000.50 within thirty (30) days; the Supplier shall deliver. " * 3
CHINESE = "第十二条　甲方应在收到发票后三十日内付款。𠮷野家🖋有限公司。甲方应在收到发票后付款，"
MIXED = f"  {CHINESE}\n\n{ENGLISH}\tZoë’s naïve café — 🖋🖋 e\u0301tude\x00end. {CHINESE}"
STOPS = frozenset({0})


def trained(text: str) -> Any:
    """Byte-level BPE whose merges join bytes across the ends of characters, as those of real models do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="module", params=["bytes", "trained"])
def index(request: pytest.FixtureRequest, tiny_model: Path) -> QuoteIndex:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model) if request.param == "bytes" else trained(MIXED)
    return QuoteIndex(tokenizer, MIXED, STOPS)


def drawn_ids(index: QuoteIndex, generator: torch.Generator, most: int, *, lean: int | None = None) -> list[int]:
    """The tokens that random scores choose; `lean` makes one token likelier than all others."""
    constraint = index.start()
    sampler = Sampler(GenerationParams(max_new_tokens=most), [1], stop_ids=STOPS, constraint=constraint)
    ids: list[int] = []
    while not sampler.is_complete and len(ids) < most:
        logits = torch.randn(1, 500, generator=generator)
        if lean is not None:
            logits[:, lean] += 100
        (drawn,) = draw(logits, [sampler])
        assert isinstance(drawn, Drawn), drawn
        if drawn.token in sampler.ending:
            break
        ids.append(drawn.token)
    return ids


def test_every_quote_is_the_document_text_at_its_place(index: QuoteIndex, generator: torch.Generator) -> None:
    borders = {0, len(MIXED)} | {at for word in WORD.finditer(MIXED) for at in word.span()}
    for _ in range(150):
        ids = drawn_ids(index, generator, MOST_QUOTE_TOKENS)
        quote = index.quote(ids)
        if quote is None:
            continue
        assert quote.text == MIXED[quote.start : quote.stop] == quote.text.strip() != ""
        assert quote.start in borders or not MIXED[quote.start].isalnum()


def test_a_quote_that_is_cut_short_ends_at_a_word_where_one_ends_before(
    index: QuoteIndex, generator: torch.Generator
) -> None:
    inside = {at for word in WORD.finditer(MIXED) for at in range(word.start() + 1, word.end())}
    for most in range(1, 40):
        quote = index.quote(drawn_ids(index, generator, most))
        if quote is not None and any(stop not in inside for stop in range(quote.start + 1, quote.stop)):
            assert quote.stop not in inside


def test_no_quote_ends_by_itself_before_it_says_something(index: QuoteIndex, generator: torch.Generator) -> None:
    for _ in range(20):
        ids = drawn_ids(index, generator, MOST_QUOTE_TOKENS, lean=0)
        assert len(ids) >= LEAST_TOKENS or index.quote(ids) is None


def test_a_model_can_write_every_span_and_its_place_is_the_first(index: QuoteIndex, seed: int) -> None:
    wanted = "甲方应在收到发票后"
    starts = [at for at in index.starts[:-1].tolist() if MIXED[index._offsets[at][0] :].lstrip().startswith(wanted)]
    assert len(starts) >= 2
    stop = next(at for at in range(starts[0], index.num_tokens) if index._offsets[at][1] >= MIXED.index(wanted) + 9)
    ids = index.ids[starts[0] : stop + 1].tolist()

    quote = index.quote(ids)

    assert quote is not None
    assert quote.start == MIXED.index(wanted)
    assert wanted.startswith(quote.text) or quote.text.startswith(wanted)


def test_none_is_no_quote_and_can_always_be_written(index: QuoteIndex) -> None:
    constraint = index.start()
    for token in index.ids[index.num_tokens + 1 : index.none_at + 1].tolist():
        logits = torch.zeros(500)
        constraint.mask(logits, may_end=True)
        assert logits[token] == 0
        constraint.accept(token)
    assert constraint.is_complete
    assert index.quote(index.ids[index.num_tokens + 1 : index.none_at + 1].tolist()) is None
    assert index.quote([]) is None


@pytest.mark.parametrize("text", ["", " \n\t", "\u200b", "🖋"])
def test_a_document_without_words_has_no_quote_but_none(tiny_model: Path, text: str) -> None:
    index = QuoteIndex(AutoTokenizer.from_pretrained(tiny_model), text, STOPS)

    assert index.starts.tolist() == [index.num_tokens + 1]


def test_the_word_none_of_a_document_is_no_quote(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    index = QuoteIndex(tokenizer, f"It says {NONE} of these.", STOPS)

    assert index.quote(tokenizer.encode(NONE)) is None
    assert index.quote(tokenizer.encode(f"{NONE} of")) == Quote(f"{NONE} of", 8, 15)


def test_a_quote_may_begin_without_the_blank_before_its_word() -> None:
    text = "They pay the Supplier shall pay"
    index = QuoteIndex(trained(text * 3), text, STOPS)
    bare = [(first, alone) for first, alone in zip(index.first_ids, index.bare_ids, strict=True) if first != alone]
    assert bare

    for _, alone in bare:
        quote = index.quote([int(alone)])
        assert quote is not None
        assert text[quote.start : quote.stop] == quote.text


def test_the_quote_is_asked_for_behind_question_and_answer(tiny_model: Path) -> None:
    prompter = Prompter(tiny_model, "Answer.")

    ids = prompter.quote_ids("Who pays?", "The <|im_end|> Supplier.")

    begin = prompter.question_ids("Who pays?")
    assert ids[: len(begin)] == begin
    asked = prompter.tokenizer.decode(ids[len(begin) :])
    assert asked.startswith("The <|im_end|> Supplier.<|im_end|>\n<|im_start|>user\nQuote the words")
    assert asked.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ends = ids[len(begin) :].count(prompter.tokenizer.eos_token_id)
    assert ends == 2  # of the answer's turn and the instruction's: the answer's own words end nothing
