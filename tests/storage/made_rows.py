"""Rows and small objects for the tests of the storage floor."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from storage.database import Database
from storage.fingerprint import FORMAT_VERSION, Fingerprint
from storage.items import NewAnswer, OpenItem, claim_items
from storage.jobs import NewQuestion, NewSource, create_job
from storage.manifest import ChunkEntry, Manifest, Producer

NOW = datetime(2026, 11, 3, 21, 0, 0, 123456, tzinfo=UTC)
DOC = "d0" * 32
OTHER_DOC = "d1" * 32
Result = TypeVar("Result")


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def source(document_id: str = DOC, name: str = "contract.pdf") -> NewSource:
    return NewSource(name=name, document_id=document_id, num_chars=1000, page_starts=(0, 500), pages_without_text=(2,))


def unreadable(name: str = "scan.pdf") -> NewSource:
    return NewSource(name=name, error_code="no_text", error="3 of its 3 pages have no text; run OCR.")


def question(number: int = 0, **changes: Any) -> NewQuestion:
    made = {"question_id": f"q{number}", "title": f"Title {number}", "text": f"Question {number}?"}
    return NewQuestion(**{**made, "params": {"max_new_tokens": 8}, **changes})


def submit(
    database: Database,
    *,
    sources: list[NewSource] | None = None,
    questions: int | list[NewQuestion] = 3,
    tenant: str = "acme",
    model: str = "tiny",
    title: str = "Night",
    now: datetime = NOW,
    **options: Any,
) -> str:
    with database.writing() as session:
        return create_job(
            session,
            tenant=tenant,
            model=model,
            title=title,
            sources=[source()] if sources is None else sources,
            questions=[question(n) for n in range(questions)] if isinstance(questions, int) else questions,
            now=now,
            **options,
        )


def claim(
    database: Database,
    owner: str = "worker-1",
    *,
    limit: int = 100,
    document_id: str = DOC,
    tenant: str = "acme",
    model: str = "tiny",
    now: datetime = NOW,
    lease_s: float = 60,
    only_fast: bool = False,
) -> list[OpenItem]:
    with database.writing() as session:
        return claim_items(
            session,
            tenant=tenant,
            document_id=document_id,
            model=model,
            owner=owner,
            limit=limit,
            now=now,
            lease_s=lease_s,
            only_fast=only_fast,
        )


def answer(text: str = "Ninety days.", **changes: Any) -> NewAnswer:
    made: dict[str, Any] = {
        "text": text,
        "finish": "stop",
        "snapshot_id": None,
        "cached_tokens": 1000,
        "question_tokens": 12,
        "output_tokens": 4,
        "first_token_s": 0.25,
        "total_s": 1.0,
        "worker": "host-1",
    }
    return NewAnswer(**{**made, **changes})


def fingerprint(**changes: Any) -> Fingerprint:
    made = {field.name: f"{field.name} of the test" for field in fields(Fingerprint)}
    return Fingerprint(**{**made, "tenant": "acme", "document_id": DOC, "format_version": FORMAT_VERSION, **changes})


def entry(number: int = 0, **changes: Any) -> ChunkEntry:
    made: dict[str, Any] = {
        "key": f"{number:064x}",
        "start": 4 * number,
        "stop": 4 * number + 4,
        "size_bytes": 100 + number,
        "xxh3": f"{number:032x}",
        "sha256": f"{number + 1:064x}",
        "parts": ((100 + number, f"{number:032x}"),),
    }
    return ChunkEntry(**{**made, **changes})


def manifest(chunks: tuple[ChunkEntry, ...] | None = None, **changes: Any) -> Manifest:
    found = (entry(0), entry(1)) if chunks is None else chunks
    made: dict[str, Any] = {
        "fingerprint": fingerprint().fields(),
        "num_tokens": found[-1].stop,
        "num_layers": 2,
        "chunks": found,
        "codec": "raw",
        "probe_token_ids": (17, 3, 0),
        "probe_logits": (12.5, 3.25, -0.1),
        "producer": Producer(version="2026.12.0", device="cpu", torch="2.13.0"),
    }
    return Manifest(**{**made, **changes})


def race(work: Callable[[int], Result], racers: int) -> list[Result]:
    """Runs `work(0)`, `work(1)` ... on a thread each, all begun at the same moment."""
    start = threading.Barrier(racers)

    def run(number: int) -> Result:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(racers) as pool:
        return list(pool.map(run, range(racers)))
