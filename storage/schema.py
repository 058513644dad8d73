"""The tables. Rows are the truth; messages on the queues are only hints to look at them.

Every query is bound to a tenant where the table has one. Times are aware UTC in both databases.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from storage.tiers import Stage, Tier

SCHEMA_HEAD = "0011"

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class ItemState(StrEnum):
    """Of one document × one question. The last four are final; a held one becomes queued when its job's time comes."""

    HELD = "held"
    QUEUED = "queued"
    RUNNING = "running"
    ANSWERED = "answered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


WAITING_STATES = (ItemState.HELD, ItemState.QUEUED)
OPEN_STATES = (*WAITING_STATES, ItemState.RUNNING)


# Where a job counts how its items ended
COUNTS = {
    ItemState.ANSWERED: "num_answered",
    ItemState.FAILED: "num_failed",
    ItemState.CANCELLED: "num_cancelled",
    ItemState.EXPIRED: "num_expired",
}
READING = -1  # in place of a question's position
SPEC_PARAM = "answer_spec"  # among a question's params: what reports need, and no worker


class SnapshotState(StrEnum):
    WRITING = "writing"
    READY = "ready"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    EXPIRED = "expired"
    REMOVED = "removed"


GONE_STATES = (SnapshotState.EXPIRED, SnapshotState.REMOVED)  # their objects are for the sweep


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC in, aware UTC out; SQLite drops the zone, so it is put back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class PlainText(TypeDecorator[str]):
    """Text that every database takes: PostgreSQL refuses NUL, and names of files may hold bytes that are no UTF-8."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else value.replace("\0", "").encode(errors="replace").decode()


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        list[int]: JSON,
        list[str]: JSON,
        str: String(255),
    }


_UNFINISHED = text("finished_at IS NULL")
_QUEUED = text("state = 'queued'")
_TAKEN = text("owner IS NOT NULL")
BigId = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers only INTEGER keys by itself


class DocumentRow(Base):
    """One normalised text, whatever its files are called. The text itself lies in the object store.

    `sent_way` and `sent_why` say how its questions were last sent (storage/ways.py); null: nobody has chosen.
    """

    __tablename__ = "documents"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    document_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    text_key: Mapped[str] = mapped_column(PlainText)
    num_chars: Mapped[int]
    created_at: Mapped[datetime]
    sent_way: Mapped[str | None] = mapped_column(String(16))
    sent_why: Mapped[str | None] = mapped_column(String(32))


class JobRow(Base):
    """A set of sources times a set of questions. The counts are of its items: `num_open` and, by how they ended, the
    others; they change in the transaction that changes the items, and with the last open one the job has finished.

    `client_key` is the submitter's own name for the job, `content_sha256` what was submitted under it. With
    `reuse_answers`, what was answered before from an equal snapshot is taken over. `mode`: the job's own way from its
    documents to their answers; null: the one of the settings.
    """

    __tablename__ = "jobs"

    job_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str]
    model: Mapped[str] = mapped_column(PlainText)
    title: Mapped[str] = mapped_column(PlainText)
    created_at: Mapped[datetime]
    cancelled_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    client_key: Mapped[str | None]
    content_sha256: Mapped[str | None] = mapped_column(String(64))
    not_before: Mapped[datetime | None]
    answer_by: Mapped[datetime | None]
    reuse_answers: Mapped[bool] = mapped_column(default=False, server_default=false())
    tier: Mapped[Tier] = mapped_column(String(8), default=Tier.BATCH, server_default=Tier.BATCH.value)
    mode: Mapped[str | None] = mapped_column(String(16))
    num_open: Mapped[int] = mapped_column(default=0, server_default="0")
    num_answered: Mapped[int] = mapped_column(default=0, server_default="0")
    num_failed: Mapped[int] = mapped_column(default=0, server_default="0")
    num_cancelled: Mapped[int] = mapped_column(default=0, server_default="0")
    num_expired: Mapped[int] = mapped_column(default=0, server_default="0")

    @property
    def num_items(self) -> int:
        return self.num_open + self.num_answered + self.num_failed + self.num_cancelled + self.num_expired

    __table_args__ = (
        Index(None, "tenant", "client_key", unique=True),
        Index(None, "tenant", "created_at"),
        Index("ix_jobs_unfinished", "answer_by", sqlite_where=_UNFINISHED, postgresql_where=_UNFINISHED),
    )


class SourceRow(Base):
    """One file of a job, in the order given; `error` says why it could not be read."""

    __tablename__ = "sources"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    name: Mapped[str] = mapped_column(PlainText)
    document_id: Mapped[str | None] = mapped_column(String(64))
    page_starts: Mapped[list[int]]
    pages_without_text: Mapped[list[int]]
    error_code: Mapped[str | None]
    error: Mapped[str | None] = mapped_column(PlainText)

    __table_args__ = (
        ForeignKeyConstraint(["tenant", "document_id"], ["documents.tenant", "documents.document_id"]),
        Index(None, "tenant", "document_id"),
    )


class SectionRow(Base):
    """Text [start, stop) of a document that is too long for the model: in this job it is read, and asked every
    question, as the document `section_id`. A section that several documents share is one document."""

    __tablename__ = "sections"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True)
    document_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    section_id: Mapped[str] = mapped_column(String(64))
    start: Mapped[int]
    stop: Mapped[int]

    __table_args__ = (
        Index(None, "tenant", "document_id"),
        Index(None, "tenant", "section_id"),
    )


class QuestionRow(Base):
    """One question of a job, in the order given; `error` says why it cannot be asked."""

    __tablename__ = "questions"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    question_id: Mapped[str] = mapped_column(PlainText)
    title: Mapped[str] = mapped_column(PlainText)
    text: Mapped[str] = mapped_column(PlainText)
    params: Mapped[dict[str, Any]]
    error_code: Mapped[str | None]
    error: Mapped[str | None] = mapped_column(PlainText)


class ItemRow(Base):
    """One document × one question of a job: the unit of work. Two sources with one text share their items.

    Where `question_position` is READING, the work is the document's snapshot, made before the questions come.
    """

    __tablename__ = "items"

    item_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"))
    tenant: Mapped[str]
    document_id: Mapped[str] = mapped_column(String(64))
    question_position: Mapped[int]
    state: Mapped[ItemState] = mapped_column(String(16))
    attempts: Mapped[int] = mapped_column(default=0)
    owner: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    kicked_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    error_code: Mapped[str | None]
    error: Mapped[str | None] = mapped_column(PlainText)

    __table_args__ = (
        UniqueConstraint("job_id", "document_id", "question_position"),
        Index(None, "job_id", "state"),
        Index(None, "tenant", "document_id", "state"),
        Index(None, "state", "lease_until"),
        Index(None, "owner"),
        # So that looking for what nothing was sent for costs the same among a million items that have ended.
        Index("ix_items_waiting", "kicked_at", "item_id", sqlite_where=_QUEUED, postgresql_where=_QUEUED),
    )


class AnswerRow(Base):
    """The answer of an item, with its usage and lineage; written in the transaction that ends the item.

    `quote` is document text [quote_start, quote_stop), which the model chose when it was asked by `quote_prompt`; null
    beside a `quote_prompt`: it named none. `carried_from` is the item that it was first the answer of, where it was
    taken over from an earlier job; it then cost nothing. What it cost follows the rules of docs/cost.md: `device_s` of
    the steps, its share `prefill_s` of the reading, and `load_s` and `load_bytes` of the load that it was the first
    answer from. `loaded_from` is where that load came from (memory, copies, store); null for the others.
    `way` and `why` are those of storage/ways.py.
    """

    __tablename__ = "answers"

    item_id: Mapped[int] = mapped_column(
        BigId, ForeignKey("items.item_id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    text: Mapped[str] = mapped_column(PlainText)
    finish: Mapped[str] = mapped_column(String(16))
    snapshot_id: Mapped[int | None] = mapped_column(BigId, ForeignKey("snapshots.snapshot_id"))
    cached_tokens: Mapped[int]
    question_tokens: Mapped[int]
    output_tokens: Mapped[int]
    first_token_s: Mapped[float]
    total_s: Mapped[float]
    logprobs: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    quote_prompt: Mapped[str | None] = mapped_column(String(16))
    quote: Mapped[str | None] = mapped_column(PlainText)
    quote_start: Mapped[int | None]
    quote_stop: Mapped[int | None]
    worker: Mapped[str]
    created_at: Mapped[datetime]
    carried_from: Mapped[int | None] = mapped_column(BigId)
    device_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    prefill_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    load_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    load_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    loaded_from: Mapped[str | None] = mapped_column(String(8))
    way: Mapped[str] = mapped_column(String(16), default="split", server_default="split")
    why: Mapped[str] = mapped_column(String(32), default="mode", server_default="mode")


class SnapshotRow(Base):
    """One document's KV under one fingerprint. The unique row makes its prefill single-flight.

    `fence` grows with every claim; a writer whose number is no longer the row's has been overtaken. `put_s` is how
    long its `put_bytes` took to the store, each object by itself.
    """

    __tablename__ = "snapshots"

    snapshot_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    tenant: Mapped[str]
    document_id: Mapped[str] = mapped_column(String(64))
    fingerprint: Mapped[str] = mapped_column(String(64))
    fields: Mapped[dict[str, Any]]
    state: Mapped[SnapshotState] = mapped_column(String(16))
    fence: Mapped[int] = mapped_column(default=0)
    attempts: Mapped[int] = mapped_column(default=0)
    owner: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    claimed_at: Mapped[datetime | None]
    num_tokens: Mapped[int]
    done_tokens: Mapped[int] = mapped_column(default=0)
    computed_tokens: Mapped[int] = mapped_column(default=0)
    size_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    manifest_sha256: Mapped[str | None] = mapped_column(String(64))
    prefill_s: Mapped[float | None]
    put_s: Mapped[float | None]
    put_bytes: Mapped[int | None] = mapped_column(BigInteger)
    error: Mapped[str | None] = mapped_column(PlainText)
    created_at: Mapped[datetime]
    ready_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    pinned: Mapped[bool] = mapped_column(default=False, server_default=false())

    __table_args__ = (
        UniqueConstraint("tenant", "document_id", "fingerprint"),
        Index(None, "state", "expires_at"),
    )


class ChunkRow(Base):
    """One stored chunk of a prefix chain, which several snapshots may share."""

    __tablename__ = "chunks"

    chunk_key: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str]
    num_tokens: Mapped[int]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    xxh3: Mapped[str] = mapped_column(String(32))
    sha256: Mapped[str] = mapped_column(String(64))
    parts: Mapped[list[list[Any]] | None] = mapped_column(JSON)
    created_at: Mapped[datetime]


class SnapshotChunkRow(Base):
    __tablename__ = "snapshot_chunks"

    snapshot_id: Mapped[int] = mapped_column(
        BigId, ForeignKey("snapshots.snapshot_id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    position: Mapped[int] = mapped_column(primary_key=True)
    chunk_key: Mapped[str] = mapped_column(String(64), ForeignKey("chunks.chunk_key"), index=True)


class UnitRow(Base):
    """Work of one document that one worker does at a time: the queue in rows, from which workers choose. Items are the
    truth: a unit that is lost is made again when upkeep finds them, and one that nothing waits for goes when it is met.

    Taken while `owner` holds it until `lease_until`. `asks` grows with whatever asks for it anew.
    """

    __tablename__ = "units"

    stage: Mapped[Stage] = mapped_column(String(8), primary_key=True)
    tenant: Mapped[str] = mapped_column(primary_key=True)
    document_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tier: Mapped[Tier] = mapped_column(String(8))
    snapshot_id: Mapped[int | None] = mapped_column(BigId)
    since: Mapped[datetime]
    asks: Mapped[int] = mapped_column(default=1)
    owner: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    begun_at: Mapped[datetime | None]

    __table_args__ = (
        Index(None, "stage", "tier", "tenant", "since"),
        Index("ix_units_taken", "owner", sqlite_where=_TAKEN, postgresql_where=_TAKEN),
    )


class ShareRow(Base):
    """What a tenant was given lately: `served_s` seconds of devices at `served_at`, of which half is forgotten after
    each half-life. Locked by whoever takes up work of the tenant."""

    __tablename__ = "shares"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    served_s: Mapped[float] = mapped_column(default=0.0)
    served_at: Mapped[datetime]


class ReadingRow(Base):
    """How a job came by a document's snapshot: `computed` for it, or `found` ready; `one_piece`: computed by who
    answered, and not stored. `num_items` are the job's items of the document, which share `prefill_s`."""

    __tablename__ = "readings"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True)
    document_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    snapshot_id: Mapped[int] = mapped_column(BigId, ForeignKey("snapshots.snapshot_id"))
    way: Mapped[str] = mapped_column(String(16))
    computed_tokens: Mapped[int]
    reused_tokens: Mapped[int]
    prefill_s: Mapped[float]
    num_items: Mapped[int] = mapped_column(default=0, server_default="0")
    created_at: Mapped[datetime]


class SnapshotLeaseRow(Base):
    """Somebody is reading the snapshot until `expires_at`; it is not swept before."""

    __tablename__ = "snapshot_leases"

    snapshot_id: Mapped[int] = mapped_column(
        BigId, ForeignKey("snapshots.snapshot_id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    owner: Mapped[str] = mapped_column(primary_key=True, index=True)
    expires_at: Mapped[datetime]


class LineageRow(Base):
    """What happened to a document's snapshots. Outlives them, so it refers to nothing and holds no text."""

    __tablename__ = "lineage"

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    tenant: Mapped[str]
    document_id: Mapped[str] = mapped_column(String(64))
    snapshot_id: Mapped[int | None] = mapped_column(BigId)
    event: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(PlainText)

    __table_args__ = (Index(None, "tenant", "document_id"),)


class TombstoneRow(Base):
    """Proof that a document, or a whole tenant (`document_id` is null), was forgotten, and how much that was."""

    __tablename__ = "tombstones"

    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    tenant: Mapped[str] = mapped_column(index=True)
    document_id: Mapped[str | None] = mapped_column(String(64))
    at: Mapped[datetime]
    counts: Mapped[dict[str, Any]]


class ScheduleRow(Base):
    """A job that is submitted again and again: files of a folder or bucket, questions of a playbook, at local times.

    `variables` are values for the playbook, `params` say how answers are generated, `reading` how files are read,
    `split` what becomes of documents that are too long.
    """

    __tablename__ = "schedules"

    schedule_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    tenant: Mapped[str]
    name: Mapped[str]
    source: Mapped[str] = mapped_column(PlainText)
    questions: Mapped[str] = mapped_column(PlainText)
    variables: Mapped[dict[str, Any]]
    params: Mapped[dict[str, Any]]
    reading: Mapped[dict[str, Any]]
    split: Mapped[str] = mapped_column(String(16), server_default="refuse")
    model: Mapped[str] = mapped_column(PlainText)
    at: Mapped[str]
    prefill_at: Mapped[str | None]
    time_zone: Mapped[str]
    answer_by_s: Mapped[float | None]
    tier: Mapped[Tier] = mapped_column(String(8), default=Tier.BATCH, server_default=Tier.BATCH.value)
    created_at: Mapped[datetime]
    active_since: Mapped[datetime]
    paused_at: Mapped[datetime | None]

    __table_args__ = (UniqueConstraint("tenant", "name"),)


class ScheduleRunRow(Base):
    """One occurrence of a schedule. The unique row decides who submits it, and that it is submitted once.

    `occurrence` is the local time it was due, without a zone: one that a change of clocks repeats is one.
    """

    __tablename__ = "schedule_runs"

    run_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    schedule_id: Mapped[int] = mapped_column(BigId, ForeignKey("schedules.schedule_id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(16))
    occurrence: Mapped[str] = mapped_column(String(32))
    due_at: Mapped[datetime]
    owner: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    job_id: Mapped[str | None] = mapped_column(String(32))
    finished_at: Mapped[datetime | None]
    documents: Mapped[int] = mapped_column(default=0)
    new_items: Mapped[int] = mapped_column(default=0)
    carried_items: Mapped[int] = mapped_column(default=0)
    expected_finish_at: Mapped[datetime | None]
    warning: Mapped[str | None] = mapped_column(PlainText)
    error: Mapped[str | None] = mapped_column(PlainText)

    __table_args__ = (UniqueConstraint("schedule_id", "kind", "occurrence"),)


class WorkerRow(Base):
    """A worker that said it is alive at `seen_at`, by its own clock, which is `clock_ahead_s` ahead of the database's.

    `engine_sha256` stands for everything that must be the same in all workers: model, KV type, codec, prompt.
    """

    __tablename__ = "workers"

    worker: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(String(16))
    queues: Mapped[list[str]]
    version: Mapped[str]
    model: Mapped[str] = mapped_column(PlainText)
    engine_sha256: Mapped[str] = mapped_column(String(64))
    clock_ahead_s: Mapped[float]
    started_at: Mapped[datetime]
    seen_at: Mapped[datetime]


class PingRow(Base):
    """A message sent through a queue to see whether it is worked on, and by whom it was answered."""

    __tablename__ = "pings"

    ping_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    queue: Mapped[str]
    sent_at: Mapped[datetime] = mapped_column(index=True)
    worker: Mapped[str | None]
    answered_at: Mapped[datetime | None]


class BreakerRow(Base):
    """A circuit breaker that all processes see: closed while `opened_at` is null. `failures` since `failing_since`.
    While it is open, `probing_until` is set for whoever tries whether work succeeds again."""

    __tablename__ = "breakers"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    failures: Mapped[int] = mapped_column(default=0)
    failing_since: Mapped[datetime | None]
    opened_at: Mapped[datetime | None]
    probing_until: Mapped[datetime | None]
