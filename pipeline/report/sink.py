"""What every format of a report has in common: it is begun, takes lines in order, and is finished."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.playbooks.answer_types import AnswerSpec
from pipeline.report.rows import LineInText
from pipeline.report.summary import Summary, Tally
from storage.job_report import ReportQuestion
from storage.progress import JobStatus


@dataclass(frozen=True)
class Heading:
    """What is known of a report before its first line."""

    job: JobStatus
    questions: list[ReportQuestion]
    sources: int

    @property
    def title(self) -> str:
        return self.job.title or f"Job {self.job.job_id}"

    def asked(self, number: int) -> str:
        """The question as a person wrote it."""
        question = self.questions[number]
        return AnswerSpec.of(question.spec).question or question.text


class Sink(Protocol):
    """Writes one file. Lines come source by source, each with all questions in order."""

    def add(self, found: LineInText) -> None: ...

    def finish(self, summary: Summary, tally: Tally) -> None:
        """Completes and closes the file."""

    def close(self) -> None:
        """Lets go of what is open; safe after `finish` and in the middle."""


def without_controls(text: str) -> str:
    """With U+FFFD for characters that XML and spreadsheets do not take, and plain line ends."""
    if CONTROL.search(text) is None:
        return text
    return CONTROL.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def fresh_path(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}.new")
