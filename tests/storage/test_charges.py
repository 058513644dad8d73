from dataclasses import replace

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.charge_by import ChargeBy
from storage.charges import Usage, usage
from storage.database import Database
from storage.history import asked_documents
from storage.items import answer_items, recover_items
from storage.measures import measures
from storage.pulse import pulse
from storage.schema import AnswerRow
from storage.snapshots import find_or_create, note_readings
from tests.storage.made_rows import DOC, NOW, OTHER_DOC, answer, claim, fingerprint, later, source, submit

READ_S = 6.0
COST = {"device_s": 0.5, "load_s": 0.25, "load_bytes": 1000}


def read(database: Database, document_id: str = DOC, prefill_s: float = READ_S) -> None:
    with database.writing() as session:
        row = find_or_create(session, replace(fingerprint(), document_id=document_id), num_tokens=1000, now=NOW)
        computed = 1000 if prefill_s else 0
        note_readings(session, row, model="tiny", computed_tokens=computed, prefill_s=prefill_s, now=NOW)


def answer_all(database: Database, owner: str, document_id: str = DOC, **changes: object) -> set[int]:
    ids = [item.item_id for item in claim(database, owner, document_id=document_id)]
    with database.writing() as session:
        return answer_items(session, {at: answer(**{**COST, **changes}) for at in ids}, owner=owner, now=later(1))


def shares(session: Session) -> list[float]:
    return list(session.scalars(select(AnswerRow.prefill_s)))


def test_the_answers_of_a_job_share_its_reading_and_a_later_job_pays_none_of_it(database: Database) -> None:
    submit(database, questions=3)
    read(database)
    answer_all(database, "worker-1")
    submit(database, questions=2)
    read(database, prefill_s=0.0)
    answer_all(database, "worker-2")

    with database.reading() as session:
        found = shares(session)
        used = usage(session, by=ChargeBy.TENANT, tenant="acme", now=later(2))["acme"]

    assert sorted(found) == pytest.approx([0.0, 0.0, 2.0, 2.0, 2.0])
    assert used.prefill_s == pytest.approx(READ_S)
    assert used.decode_s == pytest.approx(5 * COST["device_s"])


def test_an_attempt_that_was_overtaken_charges_nothing(database: Database) -> None:
    submit(database, questions=2)
    read(database)
    ids = [item.item_id for item in claim(database, "dead", lease_s=1)]
    with database.writing() as session:
        recover_items(session, now=later(10), max_attempts=3)
    answer_all(database, "alive")
    with database.writing() as session:
        late = answer_items(session, {at: answer(**COST) for at in ids}, owner="dead", now=later(20))

    with database.reading() as session:
        used = usage(session, by=ChargeBy.TENANT, tenant=None, now=later(30))["acme"]
        assert sum(shares(session)) == pytest.approx(READ_S)

    assert late == set()
    assert (used.answers, used.loaded_bytes) == (2, 2 * COST["load_bytes"])


def test_tenants_jobs_and_documents_add_up_to_the_same(database: Database) -> None:
    submit(database, sources=[source(), source(OTHER_DOC, "other.pdf")], questions=2)
    for document_id in (DOC, OTHER_DOC):
        read(database, document_id)
        answer_all(database, f"worker of {document_id[:2]}", document_id)
    submit(database, questions=1)
    read(database, prefill_s=0.0)
    answer_all(database, "worker-3")

    with database.reading() as session:
        found = {by: usage(session, by=by, tenant="acme", now=later(5)) for by in ChargeBy}
        assert usage(session, by=ChargeBy.JOB, tenant="nobody", now=later(5)) == {}

    assert {by: len(lines) for by, lines in found.items()} == {"tenant": 1, "job": 2, "document": 2}
    totals = [sum(lines.values(), Usage()) for lines in found.values()]
    assert all(vars(total) == pytest.approx(vars(totals[0])) for total in totals)
    assert totals[0].answers == 5


def test_the_numbers_of_a_time_leave_out_what_was_before(database: Database) -> None:
    submit(database, questions=3)
    read(database)
    answer_all(database, "worker-1", load_s=0.0, loaded_from="memory")

    with database.reading() as session:
        every = measures(session, tenant="acme", since=None)
        after = measures(session, tenant="acme", since=later(2))
        asked = asked_documents(session, "acme", "tiny")
        now = pulse(session, since=NOW)

    assert (sum(way.answers for way in every.ways.values()), every.looked_up, every.load_s) == (3, 1, [])
    assert every.prefill_s == [READ_S]
    assert (after.first_token_s, after.looked_up) == ([], 0)
    assert asked == [(1000, 1, 3)]
    assert (now.answers, now.read_tokens, now.to_read) == (3, 1000, 0)
    assert every.loads == {"memory": now.loads} and now.memory_loads == now.loads > 0
