"""How fast this database's past work was, to say how long new work takes."""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from storage.break_even import SplitRates
from storage.progress import DECODED, decode_s
from storage.schema import AnswerRow, DocumentRow, ItemRow, JobRow, ReadingRow, SnapshotRow, SnapshotState

LAST_READINGS = 200
LAST_ANSWERS = 2000
LAST_SNAPSHOTS = 200


@dataclass(frozen=True)
class Rates:
    """Of the last work of one model, over all workers together. None: there was none."""

    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    output_tokens: float | None

    def seconds(self, prefill_tokens: int, answers: int) -> float | None:
        """How long so much takes, one after the other."""
        seconds = 0.0
        if prefill_tokens:
            if self.prefill_tokens_per_s is None:
                return None
            seconds += prefill_tokens / self.prefill_tokens_per_s
        if answers:
            if self.decode_tokens_per_s is None or self.output_tokens is None:
                return None
            seconds += answers * self.output_tokens / self.decode_tokens_per_s
        return seconds


def measured_rates(session: Session, tenant: str, model: str) -> Rates:
    """`output_tokens` is the mean length of an answer."""
    readings = session.execute(
        select(ReadingRow.computed_tokens, ReadingRow.prefill_s)
        .join(JobRow, JobRow.job_id == ReadingRow.job_id)
        .where(JobRow.tenant == tenant, JobRow.model == model, ReadingRow.computed_tokens > 0)
        .order_by(ReadingRow.created_at.desc())
        .limit(LAST_READINGS)
    ).all()
    answers = session.execute(
        select(*DECODED)
        .join(ItemRow, ItemRow.item_id == AnswerRow.item_id)
        .join(JobRow, JobRow.job_id == ItemRow.job_id)
        .where(JobRow.tenant == tenant, JobRow.model == model, AnswerRow.carried_from.is_(None))
        .order_by(AnswerRow.item_id.desc())
        .limit(LAST_ANSWERS)
    ).all()
    read_s = sum(row.prefill_s for row in readings)
    decoding_s = decode_s(answers)
    written = sum(row.output_tokens for row in answers)
    return Rates(
        prefill_tokens_per_s=sum(row.computed_tokens for row in readings) / read_s if read_s else None,
        decode_tokens_per_s=written / decoding_s if decoding_s and written else None,
        output_tokens=written / len(answers) if answers else None,
    )


@dataclass(frozen=True)
class DocumentRates:
    """Of the newest snapshots and loads, over all tenants and workers."""

    split: SplitRates
    tokens_per_char: float


def document_rates(session: Session) -> DocumentRates | None:
    """None: something of it was never measured here. Bounded, however much there is: it is asked in each upkeep."""
    newest = (
        select(SnapshotRow, DocumentRow.num_chars)
        .join(
            DocumentRow,
            (DocumentRow.tenant == SnapshotRow.tenant) & (DocumentRow.document_id == SnapshotRow.document_id),
        )
        .where(SnapshotRow.state == SnapshotState.READY, SnapshotRow.put_bytes > 0, SnapshotRow.computed_tokens > 0)
        .order_by(SnapshotRow.snapshot_id.desc())
        .limit(LAST_SNAPSHOTS)
        .subquery()
    )
    columns = ("computed_tokens", "prefill_s", "put_bytes", "put_s", "size_bytes", "num_tokens", "num_chars")
    computed, read_s, put_bytes, put_s, stored, tokens, chars = (
        float(value or 0) for value in session.execute(select(*(func.sum(newest.c[name]) for name in columns))).one()
    )
    answers = (
        select(AnswerRow.load_bytes, AnswerRow.load_s).order_by(AnswerRow.item_id.desc()).limit(LAST_ANSWERS).subquery()
    )
    loaded, load_s = (
        float(value or 0)
        for value in session.execute(select(func.sum(answers.c.load_bytes), func.sum(answers.c.load_s))).one()
    )
    if not (computed and read_s and put_bytes and put_s and loaded and load_s and stored and chars):
        return None
    return DocumentRates(
        SplitRates(computed / read_s, put_bytes / put_s, loaded / load_s, stored / tokens), tokens / chars
    )


def ready_documents(session: Session, tenant: str, model: str, document_ids: list[str]) -> set[str]:
    """Those of the documents with a ready snapshot that a job of this model used."""
    found: set[str] = set()
    for start in range(0, len(document_ids), 500):
        found |= set(
            session.scalars(
                select(SnapshotRow.document_id)
                .join(ReadingRow, ReadingRow.snapshot_id == SnapshotRow.snapshot_id)
                .join(JobRow, JobRow.job_id == ReadingRow.job_id)
                .where(
                    SnapshotRow.tenant == tenant,
                    SnapshotRow.document_id.in_(document_ids[start : start + 500]),
                    SnapshotRow.state == SnapshotState.READY,
                    JobRow.model == model,
                )
            )
        )
    return found
