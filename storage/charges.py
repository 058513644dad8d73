"""What was used, added up from the rows: by tenant, job or document. docs/cost.md has the rules.

Answers that were taken over from an earlier job used nothing. Where a snapshot's row is gone, so is what it took in the
store; what was computed stays with the job's reading.
"""

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from storage.charge_by import ChargeBy
from storage.lineage import Event
from storage.schema import AnswerRow, ItemRow, JobRow, LineageRow, ReadingRow, SnapshotRow


@dataclass(frozen=True)
class Usage:
    """Sums. `input_tokens` are the questions' own, `cached_tokens` those of the documents that answers stood on,
    `computed_tokens` what prefill read for it; `stored_gb_months` until now."""

    answers: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    stored_gb_months: float = 0.0

    @property
    def device_s(self) -> float:
        return self.prefill_s + self.decode_s + self.load_s

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


MONTH_S = 30 * 86400.0


def usage(
    session: Session, *, by: ChargeBy, tenant: str | None, job_id: str | None = None, since: datetime | None = None,
    now: datetime,
) -> dict[str, Usage]:  # fmt: skip
    """What each tenant, job or document used, of one tenant or (None) of all; since `since` by when it was used."""
    found: dict[str, Usage] = {}
    for part in (_answers, _readings, _stored):
        for key, used in part(session, by, tenant, job_id, since, now).items():
            found[key] = found.get(key, Usage()) + used
    return found


def _answers(
    session: Session, by: ChargeBy, tenant: str | None, job_id: str | None, since: datetime | None, _now: datetime
) -> dict[str, Usage]:
    key = {ChargeBy.TENANT: ItemRow.tenant, ChargeBy.JOB: ItemRow.job_id, ChargeBy.DOCUMENT: ItemRow.document_id}[by]
    query = (
        select(
            key,
            func.count(),
            func.sum(AnswerRow.question_tokens),
            func.sum(AnswerRow.cached_tokens),
            func.sum(AnswerRow.output_tokens),
            func.sum(AnswerRow.device_s),
            func.sum(AnswerRow.load_s),
            func.sum(AnswerRow.load_bytes),
        )
        .join(ItemRow, ItemRow.item_id == AnswerRow.item_id)
        .where(
            AnswerRow.carried_from.is_(None),
            *_wanted(ItemRow.tenant, ItemRow.job_id, AnswerRow.created_at, tenant, job_id, since),
        )
        .group_by(key)
    )
    return {
        key: Usage(
            answers=count,
            input_tokens=int(asked),
            cached_tokens=int(cached),
            output_tokens=int(written),
            decode_s=float(decode_s),
            load_s=float(load_s),
            loaded_bytes=int(loaded),
        )
        for key, count, asked, cached, written, decode_s, load_s, loaded in session.execute(query)
    }


def _readings(
    session: Session, by: ChargeBy, tenant: str | None, job_id: str | None, since: datetime | None, _now: datetime
) -> dict[str, Usage]:
    key = {ChargeBy.TENANT: JobRow.tenant, ChargeBy.JOB: JobRow.job_id, ChargeBy.DOCUMENT: ReadingRow.document_id}[by]
    query = (
        select(key, func.sum(ReadingRow.computed_tokens), func.sum(ReadingRow.prefill_s))
        .join(JobRow, JobRow.job_id == ReadingRow.job_id)
        .where(*_wanted(JobRow.tenant, JobRow.job_id, ReadingRow.created_at, tenant, job_id, since))
        .group_by(key)
    )
    return {
        key: Usage(computed_tokens=int(tokens), prefill_s=float(seconds))
        for key, tokens, seconds in session.execute(query)
    }


def _stored(
    session: Session, by: ChargeBy, tenant: str | None, job_id: str | None, since: datetime | None, now: datetime
) -> dict[str, Usage]:
    """Each snapshot's bytes and how long they lay there, charged to the job that had it made."""
    gone = (
        select(LineageRow.snapshot_id, func.min(LineageRow.at).label("at"))
        .where(LineageRow.event.in_([Event.EXPIRED, Event.REMOVED, Event.FORGOTTEN]))
        .group_by(LineageRow.snapshot_id)
        .subquery()
    )
    query = (
        select(
            SnapshotRow.tenant,
            ReadingRow.job_id,
            SnapshotRow.document_id,
            SnapshotRow.size_bytes,
            SnapshotRow.num_tokens,
            ReadingRow.computed_tokens,
            ReadingRow.created_at,
            gone.c.at,
        )
        .join(ReadingRow, ReadingRow.snapshot_id == SnapshotRow.snapshot_id)
        .outerjoin(gone, gone.c.snapshot_id == SnapshotRow.snapshot_id)
        .where(
            ReadingRow.computed_tokens > 0,
            ReadingRow.way == "computed",  # what was read in one piece was not stored
            *_wanted(SnapshotRow.tenant, ReadingRow.job_id, None, tenant, job_id, None),
        )
    )
    found: dict[str, Usage] = {}
    for row in session.execute(query):
        key = {ChargeBy.TENANT: row.tenant, ChargeBy.JOB: row.job_id, ChargeBy.DOCUMENT: row.document_id}[by]
        begun = row.created_at if since is None else max(since, row.created_at)
        ended = now if row.at is None or row.at < row.created_at else row.at
        kept_s = max(0.0, (ended - begun).total_seconds())
        is_new = since is None or row.created_at >= since
        share = row.computed_tokens / max(row.num_tokens, 1)
        used = Usage(
            stored_bytes=round(row.size_bytes * share) if is_new else 0,
            stored_gb_months=row.size_bytes / 1e9 * kept_s / MONTH_S,
        )
        found[key] = found.get(key, Usage()) + used
    return found


def _wanted(
    of_tenant: Any, of_job: Any, at: Any, tenant: str | None, job_id: str | None, since: datetime | None
) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if tenant is not None:
        conditions.append(of_tenant == tenant)
    if job_id is not None:
        conditions.append(of_job == job_id)
    if since is not None:
        conditions.append(at >= since)
    return conditions
