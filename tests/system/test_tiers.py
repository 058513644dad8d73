"""Fast work behind a thousand batch items, and a few items beside another tenant's many: real servers and processes."""

from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import func, select

from storage.database import Database
from storage.schema import AnswerRow, ItemRow, SnapshotRow
from storage.settings import StorageSettings
from tests.system.conftest import Installation

BATCH = 16


@pytest.fixture
def crew(cluster: Installation, tiny_model: Path) -> Installation:
    # Split: one question of a short document would else be answered in one piece, and no reading would be noted.
    cluster.environment |= {
        "PLATEMAKER_MODEL": str(tiny_model),
        "PLATEMAKER_MAX_BATCH": str(BATCH),
        "PLATEMAKER_MODE": "split",
    }
    return cluster


@pytest.fixture
def database(crew: Installation) -> Iterator[Database]:
    url = SecretStr(crew.environment["PLATEMAKER_DATABASE_URL"])
    with closing(Database(StorageSettings(database_url=url))) as database:
        yield database


def contracts(folder: Path, name: str, count: int) -> list[Path]:
    paths = [folder / f"{name}-{number}.txt" for number in range(count)]
    for path in paths:
        path.write_text("".join(f"Article {n}. {path.name} delivers part {n} in {n} days.\n" for n in range(9)))
    return paths


def questions(count: int) -> list[str]:
    return [word for number in range(count) for word in ("-q", f"What of article {number}?")]


def answered(crew: Installation, job_id: str) -> int:
    return int(crew.json("status", job_id, "--json")["items"].get("answered", 0))


def answers(database: Database, job_id: str, since: datetime, until: datetime) -> int:
    with database.reading() as session:
        query = select(func.count()).select_from(AnswerRow).join(ItemRow, ItemRow.item_id == AnswerRow.item_id)
        between = (AnswerRow.created_at >= since, AnswerRow.created_at < until)
        return session.scalars(query.where(ItemRow.job_id == job_id, *between)).one()


def span(database: Database, job_id: str) -> tuple[datetime, datetime]:
    """From when the job's only document was read to its last answer."""
    with database.reading() as session:
        document_id = session.scalars(select(ItemRow.document_id).where(ItemRow.job_id == job_id)).first()
        ready_at = session.scalars(select(SnapshotRow.ready_at).where(SnapshotRow.document_id == document_id)).one()
        last = session.scalars(
            select(func.max(AnswerRow.created_at))
            .join(ItemRow, ItemRow.item_id == AnswerRow.item_id)
            .where(ItemRow.job_id == job_id)
        ).one()
    assert ready_at is not None
    return ready_at, last


def test_fast_work_behind_a_thousand_batch_items_is_next(crew: Installation, database: Database) -> None:
    asked = ("--max-tokens", "4", *questions(50))
    batch = crew.command("submit", *contracts(crew.folder, "night", 20), *asked).stdout.strip()
    crew.start("worker", "prefill")
    crew.start("worker", "decode")
    crew.wait_until(lambda: answered(crew, batch) >= BATCH, limit_s=500, what="the first answers")

    fast = crew.command("submit", *contracts(crew.folder, "now", 1), "--tier", "fast", "-q", "When?").stdout.strip()
    crew.wait_until(lambda: answered(crew, fast) == 1, limit_s=500, what="the fast answer")

    ready_at, answered_at = span(database, fast)
    # Those under way, and at most one more claim that had just been made.
    assert answers(database, batch, ready_at, answered_at) <= 2 * BATCH
    assert answers(database, batch, answered_at, datetime.max.replace(tzinfo=answered_at.tzinfo)) > 2 * BATCH
    shown = crew.command("status", fast).stdout
    assert f"{fast} finished, fast: 1 of 1 done" in shown
    assert crew.command("watch", batch, timeout_s=500).returncode == 0


def test_a_few_items_of_one_tenant_do_not_wait_for_the_many_of_another(crew: Installation, database: Database) -> None:
    asked = ("--max-tokens", "4", *questions(25))
    many = crew.command("submit", *contracts(crew.folder, "many", 30), *asked).stdout.strip()
    crew.start("worker", "all")
    crew.wait_until(lambda: answered(crew, many) >= BATCH, limit_s=500, what="the first answers")

    crew.environment["PLATEMAKER_TENANT"] = "few"
    few = crew.command("submit", *contracts(crew.folder, "few", 1), *questions(10)).stdout.strip()
    crew.wait_until(lambda: answered(crew, few) == 10, limit_s=500, what="the answers of the few")
    crew.environment["PLATEMAKER_TENANT"] = "default"

    ready_at, answered_at = span(database, few)
    assert answers(database, many, ready_at, answered_at) <= 4 * BATCH
    crew.command("cancel", many)
