"""What has to hold when the storm is over."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import boto3
from botocore.config import Config
from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from storage.database import Database, utc_now
from storage.manifest import chunk_object_key, manifest_object_key
from storage.objects import ObjectStore
from storage.retention import Lifetimes
from storage.schema import (
    COUNTS,
    OPEN_STATES,
    AnswerRow,
    ChunkRow,
    ItemRow,
    ItemState,
    JobRow,
    SnapshotLeaseRow,
    SnapshotRow,
    SnapshotState,
    UnitRow,
)
from storage.sweep import sweep
from storage.verification import chunk_digests, verify_snapshot
from storm.crew import Crew

AT_ONCE = Lifetimes(ttl_s=86_400.0, max_age_s=86_400.0, grace_s=0.0)


@dataclass(frozen=True)
class Findings:
    """Rows, and how many of them (or of what else) are not as they should be.

    `lost`: expected rows that are not there or have not ended. `failed`: ended without an answer. `duplicated`: rows
    beyond the first of a document and question, and jobs whose counts are not those of their rows. `differing`: answers
    that an undisturbed run did not give. `half_made`: snapshots that are not ready or do not prove right, and objects
    in the store that belong to none, behind a sweep. `bad_ends`: workers told to stop that ended with another status
    than 0.
    """

    rows: int
    lost: int
    failed: int
    duplicated: int
    differing: int
    half_made: int
    leases_left: int
    multiparts_left: int
    bad_ends: int

    @property
    def all_hold(self) -> bool:
        return not any(count for name, count in vars(self).items() if name != "rows")


Answers = dict[tuple[str, int], str]  # by document and position of the question


def find(crew: Crew, expected_rows: int, undisturbed: Answers, leases_left: int) -> Findings:
    """With every worker ended, so that nothing changes meanwhile."""
    with crew.database.reading() as session:
        states = Counter(session.scalars(select(ItemRow.state)))
        ended = sum(count for state, count in states.items() if state not in OPEN_STATES)
        duplicated = _repeated(session) + _miscounted(session)
        differing = sum(undisturbed.get(key) != text for key, text in answers(session).items())
    half_made = _half_made(crew.database, crew.store)
    return Findings(
        rows=states.total(),
        lost=max(0, expected_rows - ended),
        failed=ended - states[ItemState.ANSWERED],
        duplicated=duplicated,
        differing=differing,
        half_made=half_made,
        leases_left=leases_left,
        multiparts_left=_num_uploads(crew),
        bad_ends=len(crew.bad_ends),
    )


def answers(session: Session) -> Answers:
    rows = session.execute(
        select(ItemRow.document_id, ItemRow.question_position, AnswerRow.text).join(
            AnswerRow, AnswerRow.item_id == ItemRow.item_id
        )
    )
    return {(document_id, position): text for document_id, position, text in rows}


def leases_left(database: Database, *, patience_s: float) -> int:
    """Rows that somebody still holds after so long; returns as soon as there are none."""

    def count(session: Session) -> int:
        held: list[Callable[[], int | None]] = [
            lambda: session.scalar(select(func.count()).select_from(SnapshotLeaseRow)),
            lambda: session.scalar(select(func.count()).select_from(ItemRow).where(_is_held(ItemRow))),
            lambda: session.scalar(select(func.count()).select_from(SnapshotRow).where(_is_held(SnapshotRow))),
            lambda: session.scalar(select(func.count()).select_from(UnitRow).where(_is_held(UnitRow))),
        ]
        return sum(one() or 0 for one in held)

    deadline = time.monotonic() + patience_s
    while True:
        with database.reading() as session:
            left = count(session)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _is_held(table: type[ItemRow | SnapshotRow | UnitRow]) -> ColumnElement[bool]:
    return or_(table.owner.is_not(None), table.lease_until.is_not(None))


def _repeated(session: Session) -> int:
    groups = (
        select(func.count().label("count"))
        .select_from(ItemRow)
        .group_by(ItemRow.document_id, ItemRow.question_position)
        .subquery()
    )
    return int(session.scalar(select(func.coalesce(func.sum(groups.c.count - 1), 0))) or 0)


def _miscounted(session: Session) -> int:
    wrong = 0
    for job in session.scalars(select(JobRow)):
        states = Counter(session.scalars(select(ItemRow.state).where(ItemRow.job_id == job.job_id)))
        told = {state: int(getattr(job, column)) for state, column in COUNTS.items()}
        num_open = sum(states[state] for state in OPEN_STATES)
        wrong += told != {state: states[state] for state in COUNTS} or job.num_open != num_open
    return wrong


def _half_made(database: Database, store: ObjectStore) -> int:
    """A sweep without grace has to leave exactly the objects of ready snapshots, and those have to prove right."""
    sweep(database, store, AT_ONCE, now=utc_now())
    with database.reading() as session:
        rows = session.scalars(select(SnapshotRow)).all()
        digests = {row.snapshot_id: chunk_digests(session, row.snapshot_id) for row in rows}
        known = {chunk_object_key(key) for key in session.scalars(select(ChunkRow.chunk_key))}
    ready = [row for row in rows if row.state == SnapshotState.READY]
    damaged = sum(bool(verify_snapshot(store, row, digests[row.snapshot_id]).problems) for row in ready)
    known |= {manifest_object_key(row.tenant, row.document_id, row.fingerprint) for row in ready}
    there = {key for prefix in ("chunks/", "manifests/") for key in store.keys(prefix)}
    return len(rows) - len(ready) + damaged + len(there ^ known)


def _num_uploads(crew: Crew) -> int:
    server = crew.store_server
    client = boto3.client(
        "s3",
        region_name="us-east-1",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        config=Config(s3={"addressing_style": "path"}),
    )
    with closing(client):
        return len(client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", ()))
