"""The rows of a report: one per source and question, with the place of each answer in its document."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.report.evidence import DocumentIndex, Evidence
from storage.database import Database
from storage.documents import get_text
from storage.job_report import ReportRow, job_report
from storage.objects import ObjectStore


@dataclass(frozen=True)
class ReportLine:
    row: ReportRow
    evidence: Evidence | None

    @property
    def document(self) -> str:
        return Path(self.row.source).name

    @property
    def page(self) -> int | None:
        return self.evidence.page if self.evidence else None

    def record(self) -> dict[str, Any]:
        """The line as a program takes it. Also the columns of the CSV, in this order."""
        row, found = self.row, self.evidence
        return {
            "document": row.source,
            "question_id": row.question_id,
            "title": row.title,
            "question": row.question,
            "status": row.state,
            "answer": row.answer,
            "page": found.page if found else None,
            "quote": found.quote if found else None,
            "quote_start": found.start if found else None,
            "quote_stop": found.stop if found else None,
            "finish": row.finish,
            "error_code": row.error_code,
            "error": row.error,
            "document_id": row.document_id,
            "cached_tokens": row.cached_tokens,
            "question_tokens": row.question_tokens,
            "output_tokens": row.output_tokens,
            "first_token_s": row.first_token_s,
            "total_s": row.total_s,
        }


def report_lines(database: Database, store: ObjectStore, tenant: str, job_id: str) -> Iterator[ReportLine]:
    """Every source × question in the order given, whatever became of it; also of a job that still runs."""
    with database.reading() as session:
        rows = list(job_report(session, tenant, job_id))
    index: DocumentIndex | None = None
    indexed: int | None = None
    for row in rows:
        if row.answer and row.document_id is not None and indexed != row.source_position:
            index = DocumentIndex(get_text(store, tenant, row.document_id), row.page_starts)
            indexed = row.source_position
        yield ReportLine(row, index.find(row.answer) if row.answer and index else None)
