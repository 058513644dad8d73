"""Submitting jobs: everything a job is, written in one transaction, and once for a client's key."""

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from storage.documents import add_documents
from storage.errors import KeyTaken
from storage.inserting import insert_new
from storage.limits import NO_LIMITS, Limits
from storage.queue_bound import require_room
from storage.schema import READING, SPEC_PARAM, ItemRow, ItemState, JobRow, QuestionRow, SectionRow, SourceRow
from storage.tiers import Stage, Tier
from storage.units import add_units
from storage.ways import Mode

ROWS_PER_INSERT = 2000
ID_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: nothing that reads like something else


class NewSection(NamedTuple):
    """Text [start, stop) of a source's document, which is read as a document of its own."""

    document_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class NewSource:
    """One input file: a document's text id with its page map, or the error that stands in its place. `sections`: what
    is read in place of the whole, where that is too long."""

    name: str
    document_id: str | None = None
    num_chars: int = 0
    page_starts: tuple[int, ...] = ()
    pages_without_text: tuple[int, ...] = ()
    error_code: str | None = None
    error: str | None = None
    sections: tuple[NewSection, ...] = ()

    @property
    def read_chars(self) -> dict[str, int]:
        """The documents that are read for it, with their lengths."""
        if self.sections:
            return {section.document_id: section.stop - section.start for section in self.sections}
        return {} if self.document_id is None else {self.document_id: self.num_chars}


@dataclass(frozen=True)
class NewQuestion:
    """`params` are for the worker, `spec` is for reports; both are JSON."""

    question_id: str
    title: str
    text: str
    params: dict[str, Any] = field(default_factory=dict)
    error_code: str | None = None
    error: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobTimes:
    """When a job may be worked on: not sent before the one, its unfinished items expired at the other."""

    not_before: datetime | None = None
    answer_by: datetime | None = None


ANY_TIME = JobTimes()


def new_job_id() -> str:
    return "".join(secrets.choice(ID_LETTERS) for _ in range(12))


def create_job(
    session: Session,
    *,
    tenant: str,
    model: str,
    title: str,
    sources: list[NewSource],
    questions: list[NewQuestion],
    now: datetime,
    client_key: str | None = None,
    times: JobTimes = ANY_TIME,
    tier: Tier = Tier.BATCH,
    limits: Limits = NO_LIMITS,
    reuse_answers: bool = False,
    only_prefill: bool = False,
    mode: Mode | None = None,
    job_id: str | None = None,
) -> str:
    """Writes job, sources, questions, items and units, and returns the job's id. The caller commits; nothing of the job
    exists before that. Under a key that was used for the same content, the job of then is returned.

    With `only_prefill`, each document is read and kept as a snapshot, for the questions to come. `mode` None: as the
    workers' settings say. `job_id`: one of `new_job_id`, where it has to be known before.

    Raises:
        KeyTaken: the key was used for other content.
        QueueFull: so much is queued that the limits leave no room.
    """
    job_id = job_id or new_job_id()
    document_ids = list(dict.fromkeys(document_id for source in sources for document_id in source.read_chars))
    waiting = ItemState.HELD if times.not_before and times.not_before > now else ItemState.QUEUED
    asked = [(READING, NewQuestion("", "", ""))] if only_prefill else list(enumerate(questions))
    items = [
        {
            "job_id": job_id,
            "tenant": tenant,
            "document_id": document_id,
            "question_position": position,
            "state": ItemState.FAILED if question.error else waiting,
            "attempts": 0,
            "finished_at": now if question.error else None,
            "error_code": question.error_code,
            "error": question.error,
        }
        for document_id in document_ids
        for position, question in asked
    ]
    num_open = sum(item["state"] != ItemState.FAILED for item in items)
    new: dict[str, Any] = {
        "job_id": job_id,
        "tenant": tenant,
        "model": model,
        "title": title,
        "created_at": now,
        "finished_at": None if num_open else now,
        "client_key": client_key,
        "content_sha256": _content_sha256(model, sources, questions),
        "not_before": times.not_before,
        "answer_by": times.answer_by,
        "reuse_answers": reuse_answers,
        "tier": tier,
        "mode": mode,
        "num_open": num_open,
        "num_failed": len(items) - num_open,
    }
    insert_new(session, JobRow, [new])
    if client_key is not None:
        there = session.scalars(select(JobRow).filter_by(tenant=tenant, client_key=client_key)).one()
        if there.job_id != job_id:
            if there.content_sha256 != new["content_sha256"]:
                raise KeyTaken(client_key, there.job_id)
            return there.job_id
    whole = {source.document_id: source.num_chars for source in sources if source.document_id}
    add_documents(session, tenant, whole | {key: n for source in sources for key, n in source.read_chars.items()}, now)
    _insert(session, SourceRow, [_source(source, tenant, job_id, at) for at, source in enumerate(sources)])
    _insert(session, SectionRow, _sections(sources, tenant, job_id))
    _insert(session, QuestionRow, [_question(question, job_id, at) for at, question in enumerate(questions)])
    _insert(session, ItemRow, items)
    if num_open and waiting == ItemState.QUEUED:
        add_units(session, Stage.READ, tenant, document_ids, tier=tier, now=now)
    require_room(session, tenant, num_open, limits)
    return job_id


def _source(source: NewSource, tenant: str, job_id: str, position: int) -> dict[str, Any]:
    values = {**vars(source), "job_id": job_id, "position": position, "tenant": tenant}
    del values["num_chars"], values["sections"]
    return {
        **values,
        "page_starts": list(source.page_starts),
        "pages_without_text": list(source.pages_without_text),
    }


def _sections(sources: list[NewSource], tenant: str, job_id: str) -> list[dict[str, Any]]:
    """Of each document once."""
    return [
        {
            "job_id": job_id,
            "document_id": document_id,
            "position": position,
            "tenant": tenant,
            "section_id": section.document_id,
            "start": section.start,
            "stop": section.stop,
        }
        for document_id, sections in {source.document_id: source.sections for source in sources}.items()
        for position, section in enumerate(sections)
    ]


def _question(question: NewQuestion, job_id: str, position: int) -> dict[str, Any]:
    values = {**vars(question), "job_id": job_id, "position": position}
    spec = values.pop("spec")
    return {**values, "params": question.params | ({SPEC_PARAM: spec} if spec else {})}


def _insert(
    session: Session, table: type[SourceRow | SectionRow | QuestionRow | ItemRow], rows: list[dict[str, Any]]
) -> None:
    for start in range(0, len(rows), ROWS_PER_INSERT):
        # Returning makes SQLAlchemy send many rows in one statement; pg8000 would send each on its own.
        session.execute(insert(table).returning(table.job_id), rows[start : start + ROWS_PER_INSERT])


def _content_sha256(model: str, sources: list[NewSource], questions: list[NewQuestion]) -> str:
    """Of what is asked of which documents and models; not of titles and times."""
    documents = [[source.name, source.document_id, *source.sections] for source in sources]
    content = [model, documents, [asdict(one) for one in questions]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode(errors="replace")).hexdigest()
