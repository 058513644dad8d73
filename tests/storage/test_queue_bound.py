"""The bound on what is queued, on both databases."""

import pytest
from sqlalchemy import func, select

from storage.database import Database
from storage.endings import cancel_job
from storage.errors import QueueFull
from storage.limits import Limits, TenantLimit
from storage.queue_bound import refuse_if_full
from storage.schema import Base, ItemRow, JobRow, UnitRow
from tests.storage.made_rows import NOW, race, source, submit

TEN = Limits(queued_items=10)


def count(database: Database, table: type[Base]) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_a_job_beyond_the_bound_is_refused_with_the_numbers_and_writes_nothing(database: Database) -> None:
    submit(database, questions=6, limits=TEN)

    with pytest.raises(QueueFull) as caught:
        submit(database, tenant="other", sources=[source("f" * 64)], questions=5, limits=TEN)

    assert str(caught.value).startswith("6 items are not answered yet, and 5 more would go beyond the bound of 10")
    assert "PLATEMAKER_MAX_QUEUED_ITEMS" in str(caught.value)
    assert (count(database, JobRow), count(database, ItemRow), count(database, UnitRow)) == (1, 6, 1)
    submit(database, questions=4, limits=TEN)


def test_what_has_ended_makes_room(database: Database) -> None:
    job_id = submit(database, questions=10, limits=TEN)
    with database.writing() as session:
        cancel_job(session, "acme", job_id, NOW)

    submit(database, questions=10, limits=TEN)


def test_a_tenant_has_a_bound_of_its_own(database: Database) -> None:
    limits = Limits({"*": TenantLimit(queued_items=3), "big": TenantLimit(queued_items=100)})
    submit(database, questions=3, limits=limits)
    submit(database, questions=50, tenant="big", limits=limits)

    with pytest.raises(QueueFull, match="3 items of tenant acme are not answered yet, and 1 more"):
        submit(database, questions=1, limits=limits)
    submit(database, questions=3, tenant="new", limits=limits)


def test_jobs_submitted_at_the_same_time_do_not_go_beyond_the_bound_together(database: Database) -> None:
    def attempt(number: int) -> bool:
        try:
            submit(database, tenant=f"t{number}", questions=4, limits=TEN)
        except QueueFull:
            return False
        return True

    assert sum(race(attempt, 6)) == 2
    assert count(database, ItemRow) == 8


def test_a_job_that_is_there_under_its_key_needs_no_room(database: Database) -> None:
    first = submit(database, questions=10, client_key="night", limits=TEN)

    assert submit(database, questions=10, client_key="night", limits=TEN) == first
    with database.reading() as session:
        refuse_if_full(session, "acme", TEN, client_key="night")
        for key in (None, "other"):
            with pytest.raises(QueueFull):
                refuse_if_full(session, "acme", TEN, client_key=key)
