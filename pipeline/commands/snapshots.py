"""The commands that look after snapshots and end what was stored."""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands.opening import opened
from pipeline.commands.options import Json
from pipeline.exits import Exit

if TYPE_CHECKING:
    from pipeline.settings import PipelineSettings
    from pipeline.snapshot_view import SnapshotView
    from pipeline.why import Why
    from storage.database import Database
    from storage.objects import ObjectStore
    from storage.schema import SnapshotRow

snapshots = typer.Typer(no_args_is_help=True, help="The stored snapshots: look, prove, keep, move, remove.")

SnapshotId = Annotated[int, typer.Argument(help="The number that `snapshots list` shows.", show_default=False)]
DocumentName = Annotated[
    str,
    typer.Argument(metavar="FILE|DOC", help="A file, or the document's id or its first digits.", show_default=False),
]


@snapshots.command(name="list")
def list_them(limit: Annotated[int, typer.Option(min=1, help="How many.")] = 50, json_output: Json = False) -> None:
    """List the newest snapshots."""
    from storage.catalog import list_snapshots
    from storage.retention import Lifetimes
    from storage.settings import StorageSettings

    lifetimes = Lifetimes.of(StorageSettings())
    with opened() as (database, _store, settings), database.reading() as session:
        found = list_snapshots(session, settings.tenant, limit)
    for listed in found:
        row, ends = listed.row, lifetimes.end_of(listed.row)
        if json_output:
            record = {
                "snapshot_id": row.snapshot_id,
                "state": row.state,
                "document_id": row.document_id,
                "sources": listed.sources,
                "num_tokens": row.num_tokens,
                "size_bytes": row.size_bytes,
                "pinned": row.pinned,
                "expires_at": _iso(ends),
            }
            typer.echo(json.dumps(record))
        else:
            names = ", ".join(listed.sources) or row.document_id[:16]
            until = f"until {_minute(ends)}" if ends and row.state == "ready" else ""
            line = (
                f"{row.snapshot_id:>5}  {row.state:<11} {row.num_tokens:>9,} tokens {_mb(row.size_bytes):>10}  {until}"
            )
            typer.echo(f"{line}{' pinned' if row.pinned else ''}  {names}")


@snapshots.command()
def show(snapshot: SnapshotId, json_output: Json = False) -> None:
    """Say what a snapshot is of, how it is stored, how long it lives and which answers came from it."""
    from pipeline.snapshot_view import view_snapshot
    from storage.database import utc_now
    from storage.retention import Lifetimes
    from storage.settings import StorageSettings

    with opened() as (database, store, settings):
        view = view_snapshot(
            database, store, settings.tenant, snapshot, lifetimes=Lifetimes.of(StorageSettings()), now=utc_now()
        )
    if json_output:
        typer.echo(json.dumps(asdict(view)))
    else:
        _print_view(view)


@snapshots.command()
def verify(
    snapshot: Annotated[int | None, typer.Argument(help="Its number. Default: every ready one.")] = None,
    json_output: Json = False,
) -> None:
    """Read every stored byte again and compare it with the digests; what is wrong is taken out of use."""
    from sqlalchemy import select

    from storage.schema import SnapshotRow, SnapshotState
    from storage.snapshots import require_snapshot

    with opened() as (database, store, settings):
        with database.reading() as session:
            if snapshot is None:
                ready = select(SnapshotRow).filter_by(tenant=settings.tenant, state=SnapshotState.READY)
                rows = list(session.scalars(ready.order_by(SnapshotRow.snapshot_id)))
            else:
                rows = [require_snapshot(session, settings.tenant, snapshot)]
        codes = [_verify_one(database, store, row, json_output=json_output) for row in rows]
    if Exit.INCOMPLETE in codes:
        raise typer.Exit(Exit.INCOMPLETE)
    raise typer.Exit(codes[0] if snapshot is not None else Exit.OK)


def _verify_one(database: "Database", store: "ObjectStore", row: "SnapshotRow", *, json_output: bool) -> Exit:
    from storage.schema import GONE_STATES, SnapshotState
    from storage.snapshots import get_snapshot, quarantine
    from storage.verification import Verified, chunk_digests, verify_snapshot

    done = Verified(0, 0, ())
    if row.state == SnapshotState.READY:
        with database.reading() as session:
            digests = chunk_digests(session, row.snapshot_id)
        done = verify_snapshot(store, row, digests)
    if done.problems:
        with database.writing() as session:
            quarantine(session, row.snapshot_id, "; ".join(done.problems))
    with database.reading() as session:
        state = get_snapshot(session, row.snapshot_id).state
    if state in GONE_STATES:  # perhaps only since the reading began
        done = Verified(0, 0, ())
    if json_output:
        typer.echo(json.dumps({"snapshot_id": row.snapshot_id, "state": state, **asdict(done)}))
    elif done.problems:
        typer.echo(f"{row.snapshot_id:>5}  {state}: {' '.join(done.problems)}")
    elif done.num_chunks:
        typer.echo(f"{row.snapshot_id:>5}  whole: {done.num_chunks} chunks, {_mb(done.size_bytes)}")
    else:
        typer.echo(f"{row.snapshot_id:>5}  {state}: nothing to prove")
    if done.problems:
        return Exit.INCOMPLETE
    return Exit.OK if done.num_chunks else Exit.NOTHING_DONE


@snapshots.command()
def pin(snapshot: SnapshotId, json_output: Json = False) -> None:
    """Keep a snapshot though nobody uses it, up to its maximum age."""
    from storage import retention

    _change(retention.pin, snapshot, json_output=json_output)


@snapshots.command()
def unpin(snapshot: SnapshotId, json_output: Json = False) -> None:
    """Let a pinned snapshot expire again."""
    from storage import retention

    _change(retention.unpin, snapshot, json_output=json_output)


@snapshots.command()
def rm(snapshot: SnapshotId, json_output: Json = False) -> None:
    """Take a snapshot out of use; the next sweep deletes it. A later job reads its document anew."""
    from storage import retention

    _change(retention.remove, snapshot, json_output=json_output)


def _change(change: Any, snapshot_id: int, *, json_output: bool) -> None:
    from storage.database import utc_now
    from storage.snapshots import require_snapshot

    with opened() as (database, _store, settings):
        with database.writing() as session:
            change(session, settings.tenant, snapshot_id, now=utc_now())
        with database.reading() as session:
            row = require_snapshot(session, settings.tenant, snapshot_id)
    record = {"snapshot_id": row.snapshot_id, "state": row.state, "pinned": row.pinned}
    pinned = ", pinned" if row.pinned else ""
    typer.echo(json.dumps(record) if json_output else f"Snapshot {row.snapshot_id} is {row.state}{pinned}.")


@snapshots.command(name="why")
def explain(document: DocumentName, json_output: Json = False) -> None:
    """Say whether a document would find its snapshot now; if not, what differs and what reading it costs."""
    from kernels.settings import KernelSettings
    from pipeline.find_document import Meant, find_document
    from pipeline.why import why
    from storage.catalog import document_sections
    from tasks.engine import Engine

    with opened() as (database, store, settings):
        meant, engine = find_document(database, settings, document), Engine(KernelSettings())
        with database.reading() as session:
            sections = document_sections(session, settings.tenant, meant.document_id)
        pieces = [Meant(section) for section in sections] or [meant]
        found = [why(database, store, engine, settings.tenant, piece) for piece in pieces]
    for number, each in enumerate(found, 1):
        if json_output:
            typer.echo(json.dumps({"section": number if sections else None, **asdict(each)}))
        else:
            if sections:
                typer.echo(f"Section {number} of {len(found)}, {each.document_id[:16]}:")
            _print_why(each)


@snapshots.command()
def export(
    snapshot: SnapshotId,
    file: Annotated[Path, typer.Argument(metavar="FILE.tar", help="The file to write.", show_default=False)],
    json_output: Json = False,
) -> None:
    """Write a snapshot to one file, for `snapshots import` on another machine."""
    from storage.archive import export_snapshot
    from storage.errors import SnapshotMissing
    from storage.schema import SnapshotState
    from storage.snapshots import require_snapshot

    with opened() as (database, store, settings):
        with database.reading() as session:
            row = require_snapshot(session, settings.tenant, snapshot)
        if row.state != SnapshotState.READY:
            raise SnapshotMissing(f"{snapshot} that is ready")
        size_bytes = export_snapshot(store, row, file)
    record = {"snapshot_id": snapshot, "file": str(file), "size_bytes": size_bytes}
    typer.echo(json.dumps(record) if json_output else f"{file}: snapshot {snapshot}, {_mb(size_bytes)}")


@snapshots.command(name="import")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar", help="What `export` wrote.", show_default=False)],
    json_output: Json = False,
) -> None:
    """Take over an exported snapshot of this tenant, after every byte of it was proved."""
    import os
    import socket

    from storage.archive import import_snapshot
    from storage.database import utc_now

    with opened() as (database, store, settings):
        owner = f"{socket.gethostname()}:{os.getpid()}:import"
        row = import_snapshot(database, store, file, tenant=settings.tenant, owner=owner, now=utc_now())
    record = {"snapshot_id": row.snapshot_id, "document_id": row.document_id, "state": row.state}
    typer.echo(json.dumps(record) if json_output else f"Snapshot {row.snapshot_id} is {row.state}.")


def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    json_output: Json = False,
) -> None:
    """Expire snapshots and delete what nobody needs from the object store. Workers do this by themselves."""
    from storage.database import utc_now
    from storage.retention import Lifetimes, expire
    from storage.settings import StorageSettings
    from storage.sweep import sweep as sweep_store

    lifetimes = Lifetimes.of(StorageSettings())
    with opened() as (database, store, _settings):
        now = utc_now()
        with database.reading() if dry_run else database.writing() as session:
            expired = expire(session, lifetimes, now=now)  # a reading session commits nothing
        swept = sweep_store(database, store, lifetimes, now=now, dry_run=dry_run)
    if json_output:
        typer.echo(json.dumps({"dry_run": dry_run, "expired": expired, **asdict(swept)}))
    else:
        typer.echo(
            f"{'Would expire' if dry_run else 'Expired'} {expired} snapshots and "
            f"{'would delete' if dry_run else 'deleted'} {swept.manifests} manifests, {swept.chunks} chunks "
            f"({_mb(swept.chunk_bytes)}) and {swept.orphans} objects without a row ({_mb(swept.orphan_bytes)})."
        )


def forget(
    document: Annotated[
        str | None, typer.Argument(metavar="[FILE|DOC]", help="A file, or the document's id.", show_default=False)
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Forget everything of the tenant; must be the one in PLATEMAKER_TENANT.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Erase a document: its text, snapshots, questions' answers. A tombstone with the counts stays."""
    if (document is None) == (tenant is None):
        raise typer.BadParameter("give a file or document id, or --tenant T.")
    from pipeline.find_document import find_document
    from storage.database import utc_now
    from storage.forget import forget_document, forget_tenant

    with opened() as (database, store, settings):
        if document is not None:
            document_id = find_document(database, settings, document).document_id
            counts = forget_document(database, store, settings.tenant, document_id, now=utc_now())
        else:
            _require_own(settings, tenant)
            document_id = None
            counts = forget_tenant(database, store, settings.tenant, now=utc_now())
    if json_output:
        typer.echo(json.dumps({"tenant": settings.tenant, "document_id": document_id, **asdict(counts)}))
    else:
        parts = ", ".join(f"{count} {name}" for name, count in asdict(counts).items())
        typer.echo(f"Forgot {document_id or settings.tenant}: {parts}.")


def _require_own(settings: "PipelineSettings", tenant: str | None) -> None:
    if tenant != settings.tenant:
        raise typer.BadParameter(f"you are {settings.tenant}; set PLATEMAKER_TENANT={tenant} to forget {tenant}.")


def _print_view(view: "SnapshotView") -> None:
    lines = {
        "snapshot": f"{view.snapshot_id}, {view.state}{', pinned' if view.pinned else ''}",
        "document": view.document_id,
        "sources": ", ".join(view.sources) or "–",
        "tokens": f"{view.num_tokens:,}" + (f" in {view.num_layers} layers" if view.num_layers else ""),
        "size": f"{_mb(view.size_bytes)} in {len(view.chunks)} chunks",
        "codec": (view.codec or "–") + "".join(f", {name} {value:.2e}" for name, value in view.codec_error.items()),
        "made": f"{view.ready_at or '–'} by {view.producer or '–'}",
        "last used": view.last_used_at or "–",
        "expires": view.expires_at or "–",
        "leases": ", ".join(f"{lease['owner']} until {lease['expires_at']}" for lease in view.leases) or "none",
        "answers": ", ".join(f"{each['answers']} of job {each['job_id']}" for each in view.answers) or "none",
        "problem": view.problem or "none",
    }
    for name, value in lines.items():
        typer.echo(f"{name:10} {value}")
    for name, value in view.fingerprint.items():
        if name not in ("tenant", "document_id"):
            typer.echo(f"  {name:14} {value or '–'}")
    for chunk in view.chunks:
        typer.echo(f"  chunk {chunk['key']}  {chunk['num_tokens']} tokens  sha256 {chunk['sha256']}")
    for event in view.lineage:
        typer.echo(f"  {event['at']}  {event['event']}  {event['detail']}")


def _print_why(found: "Why") -> None:
    which = f"Snapshot {found.snapshot_id}" if found.snapshot_id is not None else "None"
    typer.echo(f"{'Hit' if found.hit else 'Miss'}: {which}; {found.reason}.")
    for difference in found.differences:
        typer.echo(f"  {difference.field}: now {difference.here}, then {difference.snapshot}")
    if not found.hit:
        seconds = "not measured yet" if found.prefill_s is None else f"about {found.prefill_s:,.1f} s"
        reused = f"; {found.reused_tokens:,} of {found.num_tokens:,} are stored" if found.reused_tokens else ""
        typer.echo(f"A new prefill reads {found.new_tokens:,} tokens ({seconds}{reused}).")
    if found.sent is not None:
        typer.echo(f"Its questions were last sent: {found.sent}.")
    if found.answers:
        typer.echo(f"Its answers came: {', '.join(f'{way} {count:,}' for way, count in found.answers.items())}.")


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _minute(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"
