"""A snapshot as one file: a plain tar of its manifest and chunks, for another machine of the same tenant.

    manifest-<sha256 of the manifest>.json, then chunks/<chain hash>.safetensors in the manifest's order

Digests prove that the file is whole, not who made it: import what you trust.
"""

import io
import re
import tarfile
from collections.abc import Iterator
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import select

from storage.database import Database
from storage.errors import ArchiveRefused, SnapshotCorrupt
from storage.fingerprint import Fingerprint
from storage.lineage import Event
from storage.loading import get_chunks
from storage.manifest import ChunkEntry, Manifest, verify_chunk
from storage.objects import ObjectStore, without_copies
from storage.schema import ChunkRow, SnapshotRow, SnapshotState
from storage.snapshots import (
    abandon_writing,
    add_chunk,
    claim_writing,
    find_or_create,
    get_manifest,
    publish,
    put_manifest,
)

MANIFEST_NAME = re.compile(r"manifest-([0-9a-f]{64})\.json")
CHUNK_NAME = re.compile(r"chunks/([0-9a-f]{64})\.safetensors")
HEX_64 = re.compile(r"[0-9a-f]{64}")
LARGEST_MANIFEST_BYTES = 64 * 2**20
IMPORT_LEASE_S = 3600.0


def export_snapshot(store: ObjectStore, row: SnapshotRow, path: Path) -> int:
    """Writes a ready snapshot to the file, every byte verified; returns its size in bytes.

    Raises:
        SnapshotCorrupt, ObjectMissing: it is not what was published; no file is left.
    """
    store = without_copies(store)  # read once, and maybe on a host that answers nothing
    manifest = get_manifest(store, row)
    data = manifest.encode()
    partial = path.with_name(f"{path.name}.partial")
    try:
        with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
            _add(tar, f"manifest-{sha256(data).hexdigest()}.json", data)
            for entry, chunk in get_chunks(store, manifest.objects):
                _add(tar, entry.object_key, chunk)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def import_snapshot(
    database: Database, store: ObjectStore, path: Path, *, tenant: str, owner: str, now: datetime
) -> SnapshotRow:
    """Takes over an exported snapshot, after all of the file was proved; returns its row. Ready already: no change.

    Raises:
        ArchiveRefused: not such a file, damaged, of another tenant, or at odds with what is stored.
    """
    manifest, fingerprint = _prove(path, tenant)
    _refuse_other_chunks(database, path, manifest)
    with database.writing() as session:
        row = find_or_create(session, fingerprint, num_tokens=manifest.num_tokens, now=now)
        if row.state == SnapshotState.READY:
            return row
        claim = claim_writing(session, row.snapshot_id, owner=owner, now=now, lease_s=IMPORT_LEASE_S)
    if claim is None:
        raise ArchiveRefused(path.name, "its document is just being read; try again later")
    try:
        for entry, data in _chunks(path, manifest):
            store.put(entry.object_key, data)
            with database.writing() as session:
                add_chunk(session, tenant, entry, now)
        digest = put_manifest(store, row, manifest)
        with database.writing() as session:
            publish(
                session,
                claim,
                manifest,
                manifest_sha256=digest,
                computed_tokens=0,
                prefill_s=0.0,
                now=now,
                event=Event.IMPORTED,
            )
    except BaseException:
        with database.writing() as session:
            abandon_writing(session, claim, state=SnapshotState.WRITING, error=None)
        raise
    with database.reading() as session:
        return session.scalars(select(SnapshotRow).where(SnapshotRow.snapshot_id == row.snapshot_id)).one()


def _prove(path: Path, tenant: str) -> tuple[Manifest, Fingerprint]:
    manifest = _read_manifest(path)
    fingerprint = _fingerprint(path, manifest)
    if fingerprint.tenant != tenant:
        raise ArchiveRefused(path.name, f"it belongs to the tenant {fingerprint.tenant}")
    if not HEX_64.fullmatch(fingerprint.document_id):
        raise ArchiveRefused(path.name, "its document id is not one")
    stop = 0
    for entry in manifest.chunks:
        if not HEX_64.fullmatch(entry.key) or entry.start != stop or entry.stop <= entry.start:
            raise ArchiveRefused(path.name, "its chunks do not follow each other")
        stop = entry.stop
    if stop != manifest.num_tokens or not stop:
        raise ArchiveRefused(path.name, "its chunks do not hold all tokens")
    for entry in manifest.states or ():
        if not HEX_64.fullmatch(entry.key) or not 0 < entry.start == entry.stop <= stop:
            raise ArchiveRefused(path.name, "its states stand nowhere")
    for _ in _chunks(path, manifest):
        pass
    return manifest, fingerprint


def _fingerprint(path: Path, manifest: Manifest) -> Fingerprint:
    try:
        found = Fingerprint(**manifest.fingerprint)  # type: ignore[arg-type] # compared with what was given
    except TypeError as exc:
        raise ArchiveRefused(path.name, "its fingerprint has other fields") from exc
    kinds = {name: int if name == "format_version" else str for name in found.fields()}
    if any(type(value) is not kinds[name] for name, value in found.fields().items()):
        raise ArchiveRefused(path.name, "its fingerprint has fields of other types")
    if found.format_version != Fingerprint.format_version:
        raise ArchiveRefused(path.name, f"it has format {found.format_version}, not {Fingerprint.format_version}")
    return found


def _refuse_other_chunks(database: Database, path: Path, manifest: Manifest) -> None:
    """Other snapshots may use a stored chunk, so none is replaced by different bytes."""
    digests = {entry.key: entry.sha256 for entry in manifest.objects}
    with database.reading() as session:
        stored = session.execute(
            select(ChunkRow.chunk_key, ChunkRow.sha256).where(ChunkRow.chunk_key.in_(digests))
        ).all()
    if any(digests[key] != digest for key, digest in stored):
        raise ArchiveRefused(path.name, "some of its chunks are stored here already, computed differently")


def _read_manifest(path: Path) -> Manifest:
    name, data = next(_members(path, largest_bytes=LARGEST_MANIFEST_BYTES), ("", b""))
    found = MANIFEST_NAME.fullmatch(name)
    if found is None:
        raise ArchiveRefused(path.name, "it does not begin with a manifest")
    if sha256(data).hexdigest() != found.group(1):
        raise ArchiveRefused(path.name, "its manifest is damaged")
    try:
        return Manifest.decode(data, name)
    except (SnapshotCorrupt, ValidationError) as exc:
        raise ArchiveRefused(path.name, "its manifest cannot be read") from exc


def _chunks(path: Path, manifest: Manifest) -> Iterator[tuple[ChunkEntry, bytes]]:
    """Every chunk in order, proved; nothing else may be in the file."""
    largest = max([LARGEST_MANIFEST_BYTES, *(entry.size_bytes for entry in manifest.objects)])
    members = _members(path, largest_bytes=largest)
    next(members)
    for entry in manifest.objects:
        name, data = next(members, ("", b""))
        if name != entry.object_key:
            raise ArchiveRefused(path.name, f"{entry.object_key} is not where it belongs")
        try:
            verify_chunk(entry, data)
        except SnapshotCorrupt as exc:
            raise ArchiveRefused(path.name, f"{entry.object_key} is damaged") from exc
        if sha256(data).hexdigest() != entry.sha256:
            raise ArchiveRefused(path.name, f"{entry.object_key} is damaged")
        yield entry, data
    if next(members, None) is not None:
        raise ArchiveRefused(path.name, "it holds more than a snapshot")


def _members(path: Path, *, largest_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the plain files in the tar. Nothing is ever extracted."""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if not member.isreg() or not (
                    MANIFEST_NAME.fullmatch(member.name) or CHUNK_NAME.fullmatch(member.name)
                ):
                    raise ArchiveRefused(path.name, "it holds more than a snapshot")
                if member.size > largest_bytes:
                    raise ArchiveRefused(path.name, f"{member.name} is too large")
                file = tar.extractfile(member)
                assert file is not None, "a regular file"
                yield member.name, file.read()
    except FileNotFoundError as exc:
        raise ArchiveRefused(path.name, "there is no such file") from exc
    except (tarfile.TarError, OSError) as exc:
        raise ArchiveRefused(path.name, "it is not a readable tar file") from exc
