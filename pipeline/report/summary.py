"""What a job cost and saved, from its rows."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.report.rows import ReportLine
from storage.database import Database
from storage.progress import JobStatus, Reading, job_readings, job_status, job_timing
from storage.schema import OPEN_STATES, ItemState


@dataclass(frozen=True)
class Summary:
    """A job in numbers. `rows` and the four below count report rows: sources × questions.

    `tokens_read` is what prefill computed for this job; `tokens_without_sharing` what the answered questions would
    have read, had each read its document again.
    """

    job_id: str
    rows: int
    answered: int
    failed: int
    cancelled: int
    expired: int
    documents: int
    snapshots_found: int
    snapshots_made: int
    tokens_read: int
    tokens_reused: int
    tokens_without_sharing: int
    prefill_s: float
    snapshot_bytes: int
    output_tokens: int
    decode_s: float
    first_token_s: float | None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self.output_tokens / self.decode_s if self.decode_s else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.tokens_read / self.prefill_s if self.prefill_s else None

    def record(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
        }


def summarise(database: Database, tenant: str, job_id: str, lines: Iterable[ReportLine]) -> Summary:
    with database.reading() as session:
        status: JobStatus = job_status(session, tenant, job_id)
        readings: list[Reading] = job_readings(session, tenant, job_id)
        timing = job_timing(session, job_id)
    rows = [line.row for line in lines]
    firsts = [row.first_token_s for row in rows if row.first_token_s is not None]
    answered = sum(row.state == ItemState.ANSWERED for row in rows)
    cancelled = sum(row.state == ItemState.CANCELLED for row in rows)
    expired = sum(row.state == ItemState.EXPIRED for row in rows)
    still_open = sum(row.state in OPEN_STATES for row in rows)
    return Summary(
        job_id=job_id,
        rows=status.rows,
        answered=answered,
        failed=len(rows) - answered - cancelled - expired - still_open,
        cancelled=cancelled,
        expired=expired,
        documents=len({row.document_id for row in rows if row.document_id}),
        snapshots_found=sum(reading.way == "found" for reading in readings),
        snapshots_made=sum(reading.way == "computed" for reading in readings),
        tokens_read=sum(reading.computed_tokens for reading in readings),
        tokens_reused=sum(reading.reused_tokens for reading in readings),
        tokens_without_sharing=timing.cached_tokens,
        prefill_s=sum(reading.prefill_s for reading in readings),
        snapshot_bytes=sum(reading.size_bytes for reading in readings),
        output_tokens=timing.output_tokens,
        decode_s=timing.decode_s,
        first_token_s=statistics.median(firsts) if firsts else None,
    )
