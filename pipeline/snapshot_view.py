"""Everything a person may ask of one snapshot, from its rows and its manifest."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from storage.catalog import answers_from, snapshot_chunks, source_names
from storage.database import Database
from storage.errors import ObjectMissing, SnapshotCorrupt
from storage.leases import live_leases
from storage.lineage import snapshot_lineage
from storage.manifest import Manifest
from storage.objects import ObjectStore
from storage.retention import Lifetimes
from storage.schema import GONE_STATES, SnapshotRow
from storage.snapshots import get_manifest, require_snapshot


@dataclass(frozen=True)
class SnapshotView:
    """Times are ISO, in UTC. What only the manifest says is empty where it cannot be read; `problem` says why."""

    snapshot_id: int
    state: str
    pinned: bool
    document_id: str
    sources: tuple[str, ...]
    fingerprint: dict[str, Any]
    num_tokens: int
    size_bytes: int
    num_layers: int | None
    codec: str | None
    codec_error: dict[str, float]
    producer: str | None
    ready_at: str | None
    last_used_at: str | None
    expires_at: str | None
    leases: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    chunks: list[dict[str, Any]]
    lineage: list[dict[str, Any]]
    problem: str | None


def view_snapshot(
    database: Database, store: ObjectStore, tenant: str, snapshot_id: int, *, lifetimes: Lifetimes, now: datetime
) -> SnapshotView:
    """
    Raises:
        SnapshotMissing: this tenant has no such snapshot.
    """
    with database.reading() as session:
        row = require_snapshot(session, tenant, snapshot_id)
        names = source_names(session, tenant, [row.document_id])
        leases = live_leases(session, snapshot_id, now=now)
        answers = answers_from(session, snapshot_id)
        chunks = snapshot_chunks(session, snapshot_id)
        lineage = snapshot_lineage(session, row)
    manifest, problem = _manifest(store, row)
    return SnapshotView(
        snapshot_id=row.snapshot_id,
        state=row.state,
        pinned=row.pinned,
        document_id=row.document_id,
        sources=names.get(row.document_id, ()),
        fingerprint={"digest": row.fingerprint, **row.fields},
        num_tokens=row.num_tokens,
        size_bytes=row.size_bytes,
        num_layers=manifest.num_layers if manifest else None,
        codec=manifest.codec if manifest else None,
        codec_error=manifest.codec_error.model_dump() if manifest and manifest.codec_error else {},
        producer=f"Platemaker {manifest.producer.version}, {manifest.producer.device}" if manifest else None,
        ready_at=_iso(row.ready_at),
        last_used_at=_iso(row.last_used_at),
        expires_at=_iso(lifetimes.end_of(row)),
        leases=[{"owner": lease.owner, "expires_at": _iso(lease.expires_at)} for lease in leases],
        answers=[asdict(each) for each in answers],
        chunks=[
            {
                "key": chunk.chunk_key,
                "num_tokens": chunk.num_tokens,
                "size_bytes": chunk.size_bytes,
                "xxh3": chunk.xxh3,
                "sha256": chunk.sha256,
            }
            for chunk in chunks
        ],
        lineage=[{"at": _iso(event.at), "event": event.event, "detail": event.detail} for event in lineage],
        problem=row.error or problem,
    )


def _manifest(store: ObjectStore, row: SnapshotRow) -> tuple[Manifest | None, str | None]:
    if row.ready_at is None or row.state in GONE_STATES:
        return None, None
    try:
        return get_manifest(store, row), None
    except (ObjectMissing, SnapshotCorrupt) as exc:
        return None, str(exc)


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()
