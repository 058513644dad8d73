"""A place of its own to measure in: empty database and store, with a model that is loaded."""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from sqlalchemy import select

from kernels.params import GenerationParams
from storage.database import Database, utc_now
from storage.documents import put_text
from storage.job_report import job_report
from storage.jobs import NewQuestion, NewSource, create_job
from storage.objects import open_store, scratch_store
from storage.progress import Reading, job_readings
from storage.retention import Lifetimes
from storage.schema import AnswerRow, ItemRow, SnapshotRow
from storage.settings import StorageSettings
from storage.snapshots import get_snapshot
from tasks.engine import Engine
from tasks.prefill import prepare_snapshot
from tasks.settings import TaskSettings
from tasks.workplace import Workplace

TENANT = "measuring"


@contextmanager
def workbench(engine: Engine) -> Iterator[Workplace]:
    """Nothing of it is seen by other workers, and nothing is left."""
    with _own_folder(StorageSettings()) as storage, _opened(storage, engine, TaskSettings()) as place:
        yield place


@contextmanager
def workbench_on(storage: StorageSettings, engine: Engine) -> Iterator[Workplace]:
    """The same in a corner of a configured store, from which all snapshots are loaded: none stays in memory."""
    with (
        scratch_store(storage) as scratch,
        _own_folder(scratch, store_url=scratch.store_url) as own,
        _opened(own, engine, TaskSettings(memory_cache_mb=0)) as place,
    ):
        yield place


@contextmanager
def _own_folder(storage: StorageSettings, *, store_url: str | None = None) -> Iterator[StorageSettings]:
    with tempfile.TemporaryDirectory(prefix="platemaker-") as name:
        yield storage.model_copy(update={"data_dir": Path(name), "database_url": None, "store_url": store_url})


@contextmanager
def _opened(storage: StorageSettings, engine: Engine, settings: TaskSettings) -> Iterator[Workplace]:
    with closing(Workplace(Database(storage), open_store(storage), engine, settings, Lifetimes.of(storage))) as place:
        place.database.upgrade()
        yield place


def ask(place: Workplace, text: str, questions: Sequence[str], params: GenerationParams) -> tuple[str, str]:
    """Submits one document with its questions; returns the ids of the job and the document."""
    document_id = hashlib.sha256(text.encode()).hexdigest()
    put_text(place.store, TENANT, document_id, text)
    values = {name: value for name, value in asdict(params).items() if value is not None}
    asked = [NewQuestion(f"q{at}", "", question, values) for at, question in enumerate(questions)]
    with place.database.writing() as session:
        job_id = create_job(
            session,
            tenant=TENANT,
            model=place.engine.name,
            title="",
            sources=[NewSource("document", document_id, len(text), (0,))],
            questions=asked,
            now=utc_now(),
        )
    return job_id, document_id


def read(place: Workplace, document_id: str) -> SnapshotRow | None:
    """The document's snapshot, made now. None: it could not be."""
    snapshot_id = prepare_snapshot(place, TENANT, document_id)
    if snapshot_id is None:
        return None
    with place.database.reading() as session:
        return get_snapshot(session, snapshot_id)


def answers_of(place: Workplace, job_id: str) -> list[AnswerRow]:
    """In the order of the questions; fewer, where some have none."""
    with place.database.reading() as session:
        query = select(AnswerRow).join(ItemRow, ItemRow.item_id == AnswerRow.item_id).where(ItemRow.job_id == job_id)
        return list(session.scalars(query.order_by(ItemRow.question_position)))


def first_error(place: Workplace, job_id: str) -> str | None:
    with place.database.reading() as session:
        return next((row.error for row in job_report(session, TENANT, job_id) if row.error), None)


def reading_of(place: Workplace, job_id: str) -> Reading:
    with place.database.reading() as session:
        return job_readings(session, TENANT, job_id)[0]
