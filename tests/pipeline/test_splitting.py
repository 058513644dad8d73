"""When a document is read in sections, and how long they are."""

from pathlib import Path

import pytest

from kernels.architecture import context_len, read_config
from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.documents import Split
from pipeline.documents.document import document_id_of
from pipeline.errors import NoRoomForSections, SplitNeedsModel
from pipeline.questions import Question
from pipeline.splitting import Splitter, splitter

ASKED = [Question("q", "Q", "What is the fee?"), Question("bad", "", "x" * 9000, error_code="e", error="E.")]


def of(tiny_model: Path, questions: list[Question] = ASKED, **options: int) -> Splitter:
    made = splitter(Split.SECTIONS, KernelSettings(model=str(tiny_model)), questions, GenerationParams(**options))
    assert made is not None
    return made


def test_a_text_is_cut_where_it_no_longer_fits_and_not_before(tiny_model: Path) -> None:
    cutting = of(tiny_model)

    assert cutting.max_tokens < context_len(read_config(tiny_model))
    assert cutting.sections("x" * cutting.max_tokens) == ()
    sections = cutting.sections("x " * cutting.max_tokens)
    assert len(sections) > 1
    for section, text in sections:
        assert text == ("x " * cutting.max_tokens)[section.start : section.stop]
        assert section.document_id == document_id_of(text)
        assert cutting.counter.count(text) <= cutting.max_tokens


def test_a_longer_answer_or_a_quote_takes_its_room_and_a_few_words_do_not(tiny_model: Path) -> None:
    plain = of(tiny_model)

    assert of(tiny_model, [Question("q", "Q", "What is the fees?")]).max_tokens == plain.max_tokens
    assert of(tiny_model, max_new_tokens=1064).max_tokens == plain.max_tokens - 1024  # rounded as before
    assert of(tiny_model, [Question("q", "Q", "What is the fee?", quote=True)]).max_tokens < plain.max_tokens


def test_what_cannot_be_split_is_told(tiny_model: Path, tmp_path: Path) -> None:
    elsewhere = KernelSettings(model=str(tmp_path / "model"))

    assert splitter(Split.REFUSE, elsewhere, ASKED, GenerationParams()) is None
    with pytest.raises(SplitNeedsModel, match="PLATEMAKER_MODEL"):
        splitter(Split.SECTIONS, elsewhere, ASKED, GenerationParams())
    with pytest.raises(NoRoomForSections, match="4,096"):
        of(tiny_model, max_new_tokens=3800)
