"""Which way a document goes: by mode, by what was measured, by the state of the pools."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import select, update

from storage.break_even import SplitRates
from storage.database import Database, utc_now
from storage.rates import DocumentRates
from storage.schema import DocumentRow, ItemRow, JobRow, WorkerRow
from storage.shared_breaker import PREFILL, breaker_state, note_failure, note_success
from storage.tiers import Stage
from storage.way_facts import WaitingFacts
from storage.ways import Choice, DocumentKey, Mode, Way, Why
from storage.workers import WorkerInfo, register
from tasks.settings import TaskSettings
from tasks.way import Pools, choose, choose_fallbacks, choose_ways, in_canary, stage_of
from tests.storage.made_rows import DOC, OTHER_DOC, source, submit

NOW = utc_now()
KEY = DocumentKey("acme", DOC)
OTHER = DocumentKey("acme", OTHER_DOC)
FACTS = WaitingFacts(
    questions=1,
    wants_snapshot=False,
    modes=frozenset([None]),
    since=NOW,
    kicked_at=None,
    num_chars=4000,
    is_ready=False,
    noted=None,
)
RATES = DocumentRates(SplitRates(100.0, 1e9, 1e9, 1000.0), tokens_per_char=0.25)
WELL = Pools(None, decoders=1)


def settings(**changes: Any) -> TaskSettings:
    return TaskSettings(**{"broker_url": SecretStr("redis://127.0.0.1:9/0"), "lease_s": 10, **changes})


def chosen(facts: WaitingFacts = FACTS, pools: Pools = WELL, **changes: Any) -> Choice:
    return choose(KEY, facts, pools, RATES, settings(**changes), NOW)


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        ({}, (Way.ONE_PIECE, Why.SHORT)),
        ({"questions": 2}, (Way.SPLIT, Why.PAYS)),
        ({"num_chars": 40_000}, (Way.SPLIT, Why.PAYS)),
        ({"is_ready": True}, (Way.SPLIT, Why.READY)),
        ({"wants_snapshot": True}, (Way.SPLIT, Why.MODE)),
        ({"modes": frozenset([None, "split"])}, (Way.SPLIT, Why.MODE)),
        ({"modes": frozenset([None, "monolithic"])}, (Way.ONE_PIECE, Why.MODE)),
        ({"modes": frozenset(["split", "monolithic"])}, (Way.SPLIT, Why.MODE)),
    ],
)
def test_auto_takes_the_cheaper_way_and_a_mode_that_is_asked_for_wins(changes: Any, choice: Choice) -> None:
    assert chosen(replace(FACTS, **changes)) == choice


def test_a_slow_store_makes_more_questions_go_in_one_piece() -> None:
    slow = DocumentRates(replace(RATES.split, get_bytes_per_s=1e4), RATES.tokens_per_char)

    facts = replace(FACTS, questions=10)

    assert choose(KEY, facts, WELL, slow, settings(), NOW) == (Way.ONE_PIECE, Why.SHORT)
    assert choose(KEY, facts, WELL, RATES, settings(), NOW) == (Way.SPLIT, Why.PAYS)
    assert choose(KEY, facts, WELL, None, settings(), NOW) == (Way.SPLIT, Why.UNMEASURED)


@pytest.mark.parametrize("trouble", [Why.NO_PREFILL_POOL, Why.PREFILL_BREAKER, Why.STORE_BREAKER])
def test_auto_falls_back_where_somebody_can_answer_and_split_waits(trouble: Why) -> None:
    facts = replace(FACTS, questions=50)

    assert chosen(facts, Pools(trouble, decoders=1)) == (Way.FALLBACK, trouble)
    assert chosen(facts, Pools(trouble, decoders=0)).way == Way.SPLIT
    assert chosen(facts, Pools(trouble, decoders=1), mode=Mode.SPLIT) == (Way.SPLIT, Why.MODE)


def test_what_waits_longer_than_the_limit_is_overdue_unless_it_was_sent_just_now() -> None:
    long_ago = NOW - timedelta(hours=2)
    waits = replace(FACTS, questions=50, since=long_ago, kicked_at=long_ago)

    assert chosen(waits) == (Way.FALLBACK, Why.PREFILL_OVERLOADED)
    assert chosen(replace(waits, kicked_at=NOW)).way == Way.SPLIT
    assert chosen(replace(waits, is_ready=True)) == (Way.SPLIT, Why.READY)
    assert chosen(waits, overload_age_s=3 * 3600).way == Way.SPLIT


def test_the_canary_is_a_stable_share_of_the_documents() -> None:
    documents = [f"{number:064x}" for number in range(2000)]

    share = {document for document in documents if in_canary(document, 10)}

    assert 100 < len(share) < 300
    assert share <= {document for document in documents if in_canary(document, 20)}
    assert not any(in_canary(document, 0) for document in documents)
    assert all(in_canary(document, 100) for document in documents)


def test_a_canary_goes_the_split_way_unless_its_job_or_trouble_says_otherwise() -> None:
    canary = {"canary_percent": 100}

    assert chosen(**canary) == (Way.SPLIT, Why.CANARY)
    assert chosen(mode=Mode.MONOLITHIC, **canary) == (Way.SPLIT, Why.CANARY)
    assert chosen(replace(FACTS, modes=frozenset(["monolithic"])), **canary) == (Way.ONE_PIECE, Why.MODE)
    assert chosen(pools=Pools(Why.NO_PREFILL_POOL, 1), **canary) == (Way.FALLBACK, Why.NO_PREFILL_POOL)


def worker(database: Database, name: str, pool: str, *, started_s_ago: float = 1000, seen_s_ago: float = 0) -> None:
    queues = {"prefill": ("prefill.batch",), "decode": ("decode.batch",)}[pool]
    info = WorkerInfo(name, pool, queues, "1", "tiny", "0" * 64, utc_now() - timedelta(seconds=started_s_ago))
    with database.writing() as session:
        register(session, info, now=utc_now() - timedelta(seconds=seen_s_ago))


def ways(database: Database, task: TaskSettings, *keys: DocumentKey) -> list[Choice]:
    with database.writing() as session:
        found = choose_ways(session, keys, task, utc_now())
    return [found[key] for key in keys]


def noted(database: Database) -> list[tuple[str | None, str | None]]:
    with database.reading() as session:
        rows = session.execute(select(DocumentRow.sent_way, DocumentRow.sent_why).order_by(DocumentRow.document_id))
        return [(way, why) for way, why in rows]


def test_a_pool_that_is_gone_is_seen_in_the_registry_and_its_return_too(database: Database) -> None:
    submit(database, now=utc_now())
    task = settings()
    assert ways(database, task, KEY) == [(Way.SPLIT, Why.UNMEASURED)]  # nobody is there at all

    worker(database, "d", "decode", started_s_ago=5)
    assert ways(database, task, KEY) == [(Way.SPLIT, Why.UNMEASURED)]  # the pools may just be starting

    worker(database, "d", "decode")
    worker(database, "p", "prefill", seen_s_ago=60)
    assert ways(database, task, KEY) == [(Way.FALLBACK, Why.NO_PREFILL_POOL)]
    assert noted(database) == [("fallback", "no_prefill_pool")]

    worker(database, "p", "prefill")
    assert ways(database, task, KEY) == [(Way.SPLIT, Why.UNMEASURED)]
    assert noted(database) == [("split", "unmeasured")]


def test_inside_one_process_there_is_no_pool_to_miss(database: Database) -> None:
    submit(database, now=utc_now())
    worker(database, "d", "decode")

    assert ways(database, settings(broker_url=None), KEY) == [(Way.SPLIT, Why.UNMEASURED)]


def test_an_open_breaker_sends_all_but_one_probe_another_way(database: Database) -> None:
    submit(database, sources=[source(DOC), source(OTHER_DOC)], now=utc_now())
    worker(database, "d", "decode")
    worker(database, "p", "prefill")
    task = settings(breaker_failures=1, breaker_cool_down_s=30)
    with database.writing() as session:
        note_failure(session, PREFILL, task.breaker_rule, utc_now())
    fallback = (Way.FALLBACK, Why.PREFILL_BREAKER)
    assert ways(database, task, KEY, OTHER) == [fallback, fallback]

    cooled = settings(breaker_failures=1, breaker_cool_down_s=1e-6)
    first = ways(database, cooled, KEY, OTHER)
    again = ways(database, cooled, KEY, OTHER)

    assert sorted(first) == [fallback, (Way.SPLIT, Why.PROBE)]
    assert again == [fallback, fallback]
    with database.writing() as session:
        note_success(session, PREFILL)
        assert breaker_state(session, PREFILL, cooled.breaker_rule, utc_now()).number == 0
    assert {choice.way for choice in ways(database, cooled, KEY, OTHER)} == {Way.SPLIT}


def test_what_waits_in_vain_is_sent_once_to_who_can_answer(database: Database) -> None:
    submit(database, sources=[source(DOC), source(OTHER_DOC)], now=utc_now())
    task = settings()
    ways(database, task, KEY, OTHER)
    with database.writing() as session:
        session.execute(
            update(ItemRow).where(ItemRow.document_id == DOC).values(kicked_at=utc_now() - timedelta(minutes=1))
        )
        session.execute(update(ItemRow).where(ItemRow.document_id == OTHER_DOC).values(kicked_at=utc_now()))
    worker(database, "d", "decode")

    def taken() -> dict[DocumentKey, Choice]:
        with database.writing() as session:
            return choose_fallbacks(session, task, utc_now(), limit=10)

    assert taken() == {KEY: (Way.FALLBACK, Why.NO_PREFILL_POOL)}
    assert taken() == {}


def test_messages_go_to_the_pool_of_their_way() -> None:
    assert stage_of(Choice(Way.SPLIT, Why.PAYS)) == Stage.READ
    assert {stage_of(Choice(way, Why.MODE)) for way in (Way.ONE_PIECE, Way.FALLBACK)} == {Stage.WHOLE}


def test_a_job_keeps_the_mode_it_was_submitted_with(database: Database) -> None:
    submit(database, now=utc_now(), mode=Mode.MONOLITHIC)

    assert ways(database, settings(), KEY) == [(Way.ONE_PIECE, Why.MODE)]
    with database.reading() as session:
        assert session.scalars(select(JobRow.mode)).one() == "monolithic"
        assert not session.scalars(select(WorkerRow)).all()
