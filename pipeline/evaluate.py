"""How well a model answers and quotes, measured against gold answers."""

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kernels.model import model_folder
from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.documents import Split
from pipeline.nli_file import Gold, GoldDocument, Span
from pipeline.questions import Question
from pipeline.report.cells import CellStatus
from pipeline.report.rows import LineInText, lines_in_text
from pipeline.run import working
from pipeline.screen import follow
from pipeline.settings import PipelineSettings
from pipeline.splitting import splitter
from pipeline.submit import submit
from storage.settings import StorageSettings
from tasks.settings import TaskSettings
from tasks.upkeep import kick_waiting

LABELS = ("Entailment", "Contradiction", "NotMentioned")
UNREADABLE = "unparsed"  # an answer that is neither yes nor no nor not found


@dataclass
class Scores:
    """Sums over answers; `record` has the measures. Overlaps count characters that are not blank."""

    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)  # gold, answered
    failed: int = 0
    quotes: int = 0
    verbatim: int = 0
    overlaps: list[float] = field(default_factory=list)  # of quote and gold spans, where there is gold
    touching: int = 0
    none_right: int = 0
    nothing_to_quote: int = 0

    def add(self, found: LineInText, gold: Gold, gold_text: str) -> None:
        line, text = found
        row, cell = line.row, line.cell
        asked = [(section.start, section.row) for section in row.sections] or [(0, row)]
        named = [(start, one) for start, one in asked if one.quote is not None]
        if cell.status in (CellStatus.ERROR, CellStatus.PENDING) or (text is None and named):
            self.failed += 1
            return
        label = LABELS[not cell.value] if cell.parsed and isinstance(cell.value, bool) else UNREADABLE
        self.confusion[gold.label, LABELS[2] if cell.status == CellStatus.NOT_FOUND else label] += 1
        quoted: list[Span] = []
        for start, one in named:
            assert text is not None and one.quote_start is not None and one.quote_stop is not None
            span = start + one.quote_start, start + one.quote_stop
            self.quotes += 1
            self.verbatim += text[slice(*span)] == one.quote
            # Of a document in sections, the quotes of the answers that count
            if not row.sections or any(span == (quote.start, quote.stop) for quote in cell.quotes):
                quoted.append(_without_blanks(text, span))
        if gold.spans:
            overlap = intersection_over_union(quoted, [_without_blanks(gold_text, span) for span in gold.spans])
            self.overlaps.append(overlap)
            self.touching += overlap > 0
        else:
            self.nothing_to_quote += 1
            self.none_right += not quoted

    def record(self) -> dict[str, Any]:
        answers = sum(self.confusion.values())
        right = sum(count for (gold, answered), count in self.confusion.items() if gold == answered)
        golds = Counter[str]()
        for (gold, _), count in self.confusion.items():
            golds[gold] += count
        return {
            "answers": answers,
            "failed": self.failed,
            "accuracy": _share(right, answers),
            "accuracy_of_the_commonest_label": _share(max(golds.values(), default=0), answers),
            "quotes": self.quotes,
            "verbatim_quotes": _share(self.verbatim, self.quotes),
            "with_evidence": len(self.overlaps),
            "evidence_overlap": _share(sum(self.overlaps), len(self.overlaps)),
            "evidence_touched": _share(self.touching, len(self.overlaps)),
            "without_evidence": self.nothing_to_quote,
            "none_where_there_is_none": _share(self.none_right, self.nothing_to_quote),
            "answered": {
                gold: {answered: count for (one, answered), count in sorted(self.confusion.items()) if one == gold}
                for gold in sorted(golds)
            },
        }


def evaluate(
    documents: list[GoldDocument],
    *,
    storage: StorageSettings,
    kernel: KernelSettings,
    task: TaskSettings,
    settings: PipelineSettings,
    questions: list[Question],
    options: GenerationParams,
    split: Split,
    console: Console,
) -> dict[str, Any]:
    """Answers as `run` does, in this process; the job stays among the others."""
    with working(storage, kernel, task, console) as (app, place), tempfile.TemporaryDirectory() as folder:
        files = []
        for number, document in enumerate(documents):
            files.append(Path(folder) / f"{number}.txt")
            files[-1].write_text(document.text, "utf-8", newline="")
        made = submit(
            place.database,
            place.store,
            settings=settings,
            model=place.engine.name,
            files=files,
            questions=questions,
            options=options,
            title="evaluation",
            splitter=splitter(split, kernel, questions, options, folder=model_folder(kernel.model)),
        )
        kick_waiting(app, place.database, task)
        follow(place.database, settings.tenant, made.job_id, console=console, check=place.raise_outage)
        lines = lines_in_text(place.database, place.store, settings.tenant, made.job_id)
        scores = score(lines, documents)
    return {"model": place.engine.name, "job_id": made.job_id, "documents": len(documents), **scores.record()}


def score(lines: Iterable[LineInText], documents: list[GoldDocument]) -> Scores:
    """Of the lines about statements that have gold; sources are the documents in order."""
    scores = Scores()
    for found in lines:
        document = documents[found.line.row.source_position]
        gold = document.answers.get(found.line.row.question_id)
        if gold is not None:
            scores.add(found, gold, document.text)
    return scores


def intersection_over_union(left: list[Span], right: list[Span]) -> float:
    """Of the places in two sets of spans; 0 where one is empty."""
    a = {at for span in left for at in range(*span)}
    b = {at for span in right for at in range(*span)}
    return len(a & b) / len(a | b) if a and b else 0.0


def _without_blanks(text: str, span: Span) -> Span:
    """The span, counted in characters that are not blank: reading a file changes its blanks."""
    start = sum(map(len, text[: span[0]].split()))
    return start, start + sum(map(len, text[slice(*span)].split()))


def _share(count: float, of: int) -> float | None:
    return round(count / of, 4) if of else None
