"""What a job cost and saved, from its rows."""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.insight.costs import Prices, charges
from pipeline.report.cells import CellStatus
from pipeline.report.rows import ReportLine
from pipeline.settings import PipelineSettings
from storage.charge_by import ChargeBy
from storage.charges import usage
from storage.database import Database, utc_now
from storage.progress import JobStatus, Reading, job_readings, job_status, job_timing
from storage.schema import OPEN_STATES, ItemState


@dataclass(frozen=True)
class Summary:
    """A job in numbers. `rows` and the seven below count report rows: sources × questions.

    `answered` counts those that say that the document does not say, too; `not_found` is how many these are, `doubtful`
    how many lack a quote they need or a value of their type. `tokens_read` is what prefill computed for this job;
    `tokens_without_sharing` what the answered questions would have read, had each read its document again. The
    costs are None without prices; docs/cost.md has the rules.
    """

    job_id: str
    rows: int
    answered: int
    not_found: int
    doubtful: int
    failed: int
    cancelled: int
    expired: int
    pending: int
    documents: int
    snapshots_found: int
    snapshots_made: int
    read_in_one_piece: int
    tokens_read: int
    tokens_reused: int
    tokens_without_sharing: int
    prefill_s: float
    snapshot_bytes: int
    output_tokens: int
    decode_s: float
    first_token_s: float | None
    device_s: float
    cost: float | None
    cost_reading_every_time: float | None

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


@dataclass
class Tally:
    """Counts lines as they pass."""

    states: Counter[str] = field(default_factory=Counter)
    cells: Counter[tuple[int, CellStatus]] = field(default_factory=Counter)  # by the question's position
    doubtful: int = 0
    documents: set[str] = field(default_factory=set)
    firsts: list[float] = field(default_factory=list)

    def add(self, line: ReportLine) -> None:
        row, cell = line.row, line.cell
        self.states[row.state] += 1
        self.cells[row.question_position, cell.status] += 1
        self.doubtful += cell.doubt is not None
        if row.document_id:
            self.documents.add(row.document_id)
        if row.first_token_s is not None:
            self.firsts.append(row.first_token_s)


def summarise(database: Database, tenant: str, job_id: str, lines: Iterable[ReportLine]) -> Summary:
    tally = Tally()
    for line in lines:
        tally.add(line)
    return summary_of(database, tenant, job_id, tally)


def summary_of(database: Database, tenant: str, job_id: str, tally: Tally) -> Summary:
    with database.reading() as session:
        status: JobStatus = job_status(session, tenant, job_id)
        readings: list[Reading] = job_readings(session, tenant, job_id)
        timing = job_timing(session, job_id)
        used = usage(session, by=ChargeBy.JOB, tenant=tenant, job_id=job_id, now=utc_now())
    cost = charges(used, Prices.of(PipelineSettings()))[1]
    states = tally.states
    answered, cancelled, expired = states[ItemState.ANSWERED], states[ItemState.CANCELLED], states[ItemState.EXPIRED]
    still_open = sum(states[state] for state in OPEN_STATES)
    return Summary(
        job_id=job_id,
        rows=status.rows,
        answered=answered,
        not_found=sum(count for (_, cell), count in tally.cells.items() if cell == CellStatus.NOT_FOUND),
        doubtful=tally.doubtful,
        failed=states.total() - answered - cancelled - expired - still_open,
        cancelled=cancelled,
        expired=expired,
        pending=still_open,
        documents=len(tally.documents),
        snapshots_found=sum(reading.way == "found" for reading in readings),
        snapshots_made=sum(reading.way == "computed" for reading in readings),
        read_in_one_piece=sum(reading.way == "one_piece" for reading in readings),
        tokens_read=sum(reading.computed_tokens for reading in readings),
        tokens_reused=sum(reading.reused_tokens for reading in readings),
        tokens_without_sharing=timing.cached_tokens,
        prefill_s=sum(reading.prefill_s for reading in readings),
        snapshot_bytes=sum(reading.size_bytes for reading in readings),
        output_tokens=timing.output_tokens,
        decode_s=timing.decode_s,
        first_token_s=statistics.median(tally.firsts) if tally.firsts else None,
        device_s=cost.used.device_s,
        cost=cost.total,
        cost_reading_every_time=cost.reading_every_time,
    )
