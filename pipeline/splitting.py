"""What becomes of a document that is longer than the model's context: it is refused, or read in sections.

A section is a document of its own, with a snapshot of its own; every question is asked of each. How long it may be
follows from the model's files and the job's questions alone, and a little change of a question does not change it, so
that the next night finds the same sections.
"""

from dataclasses import dataclass
from pathlib import Path

from kernels.architecture import context_len, read_config
from kernels.params import GenerationParams
from kernels.phrases import ACKNOWLEDGEMENT, MOST_QUOTE_TOKENS, ask_for_quote
from kernels.settings import KernelSettings
from pipeline.counting import CountsTokens, TokenizerFile
from pipeline.documents import Split
from pipeline.documents.document import document_id_of
from pipeline.documents.sections import cut_sections
from pipeline.errors import NoRoomForSections, SplitNeedsModel
from pipeline.questions import Question
from storage.jobs import NewSection

MOST_OVERLAP = 512  # tokens


@dataclass(frozen=True)
class Splitter:
    """Cuts what has more than `max_tokens`."""

    counter: CountsTokens
    max_tokens: int

    def sections(self, text: str) -> tuple[tuple[NewSection, str], ...]:
        """The sections with their texts; none where the text fits as it is."""
        if self.counter.count(text) <= self.max_tokens:
            return ()
        overlap = min(self.max_tokens // 8, MOST_OVERLAP)
        found = cut_sections(text, count_tokens=self.counter.count, max_tokens=self.max_tokens, overlap_tokens=overlap)
        pieces = [(text[section.start : section.stop], section) for section in found]
        return tuple((NewSection(document_id_of(piece), cut.start, cut.stop), piece) for piece, cut in pieces)


def splitter(
    split: Split,
    kernel: KernelSettings,
    questions: list[Question],
    options: GenerationParams,
    *,
    folder: Path | None = None,
) -> Splitter | None:
    """None where nothing is to be split. `folder`: where the model's files lie, if not where the settings say.

    Raises:
        SplitNeedsModel: the model's tokenizer.json and config.json are not on this machine.
        NoRoomForSections: the longest question and its answer leave next to nothing of the context.
    """
    if split == Split.REFUSE:
        return None
    folder = folder or Path(kernel.model).expanduser()
    if not (folder / "tokenizer.json").is_file() or not (folder / "config.json").is_file():
        raise SplitNeedsModel(folder)
    counter, context = TokenizerFile(folder / "tokenizer.json"), context_len(read_config(folder))
    own = max((_own_tokens(question, options, counter) for question in questions if question.error is None), default=0)
    # The template's marks are not known here; were they more, workers would refuse a section, and say so.
    template = counter.count(kernel.system_prompt + ACKNOWLEDGEMENT) + min(512, max(96, context // 32))
    step = max(16, context // 32)
    max_tokens = context - -(-(own + template) // step) * step
    if max_tokens < context // 8:
        raise NoRoomForSections(context - max_tokens, context)
    return Splitter(counter, max_tokens)


def _own_tokens(question: Question, options: GenerationParams, counter: CountsTokens) -> int:
    own = counter.count(question.text) + (question.max_tokens or options.max_new_tokens)
    if question.quote or options.quote:
        own += counter.count(ask_for_quote(question.text)) + MOST_QUOTE_TOKENS
    return own
