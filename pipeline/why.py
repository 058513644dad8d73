"""Why a document would or would not find its snapshot under the present settings, and what reading it anew costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.find_document import Meant
from storage.catalog import document_snapshots, last_prefill_rate
from storage.database import Database
from storage.documents import get_text
from storage.fingerprint import chunk_keys, state_key
from storage.noted_ways import answers_by_choice, noted_choice
from storage.objects import ObjectStore
from storage.schema import SnapshotRow, SnapshotState
from storage.snapshots import known_chunks, stored_chunks
from storage.ways import DocumentKey
from tasks.engine import Engine


@dataclass(frozen=True)
class Difference:
    field: str
    here: str
    snapshot: str


@dataclass(frozen=True)
class Why:
    """`snapshot_id` is the snapshot that is hit, or the nearest one. Costs are those of a new prefill now. `sent` is
    the way that the document's questions were last sent, `answers` counts those it has by theirs."""

    document_id: str
    fingerprint: str
    hit: bool
    snapshot_id: int | None
    state: str | None
    reason: str
    differences: tuple[Difference, ...]
    num_tokens: int
    reused_tokens: int
    new_tokens: int
    prefill_s: float | None
    sent: str | None
    answers: dict[str, int]


def why(database: Database, store: ObjectStore, engine: Engine, tenant: str, meant: Meant) -> Why:
    """Reads the model's files but loads no weights."""
    text = get_text(store, tenant, meant.document_id) if meant.text is None else meant.text
    ids = engine.prompter.prefix_ids(text)
    fingerprint = engine.fingerprint(tenant, meant.document_id, ids)
    with database.reading() as session:
        rows = document_snapshots(session, tenant, meant.document_id)
        stops = engine.chunk_stops(len(ids))
        keys = chunk_keys(fingerprint.chain_root(), ids, stops)
        chunks = known_chunks(session, keys)
        states = stored_chunks(session, [state_key(key) for key in keys])
        rate = last_prefill_rate(session, fingerprint.weights)
        sent = noted_choice(session, DocumentKey(tenant, meant.document_id))
        answers = answers_by_choice(session, DocumentKey(tenant, meant.document_id))
    nearest, differences = _nearest(rows, fingerprint.fields())
    hit = nearest is not None and not differences and nearest.state == SnapshotState.READY
    reused = (
        len(ids)
        if hit
        else engine.reusable_tokens(
            stops[: len(chunks)],
            len(ids),
            {stop for stop, key in zip(stops, keys, strict=True) if state_key(key) in states},
        )
    )
    return Why(
        document_id=meant.document_id,
        fingerprint=fingerprint.digest(),
        hit=hit,
        snapshot_id=None if nearest is None else nearest.snapshot_id,
        state=None if nearest is None else nearest.state,
        reason=_reason(nearest, differences),
        differences=differences,
        num_tokens=len(ids),
        reused_tokens=reused,
        new_tokens=len(ids) - reused,
        prefill_s=None if rate is None else (len(ids) - reused) / rate,
        sent=None if sent is None else str(sent),
        answers={str(choice): count for choice, count in answers.items()},
    )


def _nearest(rows: Sequence[SnapshotRow], fields: dict[str, Any]) -> tuple[SnapshotRow | None, tuple[Difference, ...]]:
    """The snapshot with the fewest differing fields; a ready one before others, then the newest."""
    best: SnapshotRow | None = None
    least: tuple[Difference, ...] = ()
    for row in rows:
        found = _differences(row.fields, fields)
        order = (len(found), row.state != SnapshotState.READY)
        if best is None or order < (len(least), best.state != SnapshotState.READY):
            best, least = row, found
    return best, least


def _differences(there: dict[str, Any], here: dict[str, Any]) -> tuple[Difference, ...]:
    names = [*here, *(name for name in there if name not in here)]
    return tuple(
        Difference(name, str(here.get(name, "")), str(there.get(name, "")))
        for name in names
        if here.get(name) != there.get(name)
    )


def _reason(nearest: SnapshotRow | None, differences: tuple[Difference, ...]) -> str:
    if nearest is None:
        return "no snapshot of this document was ever begun"
    if differences:
        return f"made with another {', '.join(difference.field for difference in differences)}"
    if nearest.state == SnapshotState.READY:
        return "the snapshot is ready"
    return f"the snapshot is {nearest.state}" + (f": {nearest.error}" if nearest.error else "")
