"""What a job would take, said before anything is stored or queued."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.settings import KernelSettings
from pipeline.counting import token_counter
from pipeline.documents import AS_USUAL, Document, ReadOptions, Source, read_documents
from pipeline.questions import Question
from pipeline.settings import PipelineSettings
from pipeline.splitting import Splitter
from pipeline.words import duration
from storage.database import Database
from storage.rates import measured_rates, ready_documents


@dataclass(frozen=True)
class Estimate:
    """`tokens` are those of all documents, `prefill_tokens` of those without a ready snapshot; `answers` and `prefills`
    count each section of a document that is split. Seconds are at the
    rates of this database's past work, one document after the other; None: nothing was measured yet, or no price set.
    """

    files: int
    unreadable: int
    documents: int
    questions: int
    answers: int
    tokens: int
    tokens_are_estimated: bool
    prefills: int
    prefills_saved: int
    prefill_tokens: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    seconds: float | None
    cost: float | None

    def record(self) -> dict[str, Any]:
        return {"dry_run": True, **asdict(self)}

    def lines(self) -> list[str]:
        about = "about " if self.tokens_are_estimated else ""
        saved = f"; {self.prefills_saved:,} saved by snapshots that are ready" if self.prefills_saved else ""
        seconds = "unknown: no work of this model was measured here yet"
        if self.seconds is not None:
            seconds = f"about {duration(self.seconds)}, at the rates measured on this database"
        lines = [
            f"Files      {self.files:,}" + (f", {self.unreadable:,} cannot be read" if self.unreadable else ""),
            f"Documents  {self.documents:,}, {about}{self.tokens:,} tokens",
            f"Questions  {self.questions:,}, so {self.answers:,} answers",
            f"Prefills   {self.prefills:,}, {about}{self.prefill_tokens:,} tokens{saved}",
            f"Time       {seconds}",
        ]
        if self.cost is not None:
            lines.append(f"Cost       {self.cost:,.2f} at PLATEMAKER_PRICE_PER_DEVICE_HOUR")
        return [*lines, "Nothing was stored or queued."]


def estimate(
    database: Database,
    *,
    settings: PipelineSettings,
    kernel: KernelSettings,
    files: Sequence[Path | Source],
    questions: list[Question],
    reading: ReadOptions = AS_USUAL,
    splitter: Splitter | None = None,
    on_read: Callable[[int], None] = lambda _index: None,
) -> Estimate:
    """Reads the files and counts; writes nothing."""
    counter = token_counter(kernel)
    tokens: dict[str, int] = {}  # of what is read: documents, or their sections
    documents: set[str] = set()
    unreadable = 0
    fixed = counter.count(kernel.system_prompt)
    outcomes = read_documents(files, limits=settings.parse_limits, workers=settings.parse_workers, options=reading)
    for index, outcome in outcomes:
        if not isinstance(outcome, Document):
            unreadable += 1
        elif outcome.document_id not in documents:
            documents.add(outcome.document_id)
            for document_id, text in _pieces(outcome, splitter):
                tokens[document_id] = fixed + counter.count(text)
        on_read(index)
    with database.reading() as session:
        ready = ready_documents(session, settings.tenant, kernel.model_name, list(tokens))
        rates = measured_rates(session, settings.tenant, kernel.model_name)
    prefill_tokens = sum(count for document_id, count in tokens.items() if document_id not in ready)
    answers = len(tokens) * sum(question.error is None for question in questions)
    seconds = rates.seconds(prefill_tokens, answers)
    price = settings.price_per_device_hour
    return Estimate(
        files=len(files),
        unreadable=unreadable,
        documents=len(documents),
        questions=len(questions),
        answers=answers,
        tokens=sum(tokens.values()),
        tokens_are_estimated=counter.is_estimate,
        prefills=len(tokens) - len(ready),
        prefills_saved=len(ready),
        prefill_tokens=prefill_tokens,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_tokens_per_s=rates.decode_tokens_per_s,
        seconds=seconds,
        cost=None if price is None or seconds is None else price * seconds / 3600,
    )


def _pieces(document: Document, splitter: Splitter | None) -> list[tuple[str, str]]:
    """What is read of a document: ids and texts."""
    sections = splitter.sections(document.text) if splitter else ()
    return [(section.document_id, text) for section, text in sections] or [(document.document_id, document.text)]
