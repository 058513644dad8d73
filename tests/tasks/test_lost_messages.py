"""Messages that nobody has any more are sent again at once, and not only when the queues are empty."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import redis
from pydantic import SecretStr
from sqlalchemy import select

from pipeline.local_servers import Valkey
from pipeline.submit import Submission
from storage.database import utc_now
from storage.schema import DocumentRow
from storage.snapshots import claim_writing, find_or_create
from storage.tiers import Stage, Tier
from tasks.app import PlatemakerApp, app, configure
from tasks.broker_memory import NEVER, remembers_since
from tasks.queues import queue_of
from tasks.settings import TaskSettings
from tasks.upkeep import Upkeep, kick_waiting
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT

DATABASES = itertools.count(8)
PREFILL_QUEUE = queue_of(Stage.READ, Tier.BATCH)


@pytest.fixture
def broker(valkey_server: Valkey) -> Iterator[redis.Redis]:
    url = f"{valkey_server.url.rpartition('/')[0]}/{next(DATABASES)}"
    with redis.Redis.from_url(url) as client:
        configure(TaskSettings(broker_url=SecretStr(url)))
        yield client
    configure(TaskSettings())


def sent(broker: redis.Redis) -> int:
    return int(broker.llen(PREFILL_QUEUE))


def kick(place: Workplace, to: PlatemakerApp = app) -> int:
    return kick_waiting(to, place.database, place.settings)


def test_what_a_flushed_broker_forgot_is_sent_again_once_though_others_have_been_sent_since(
    broker: redis.Redis, place: Workplace, submit_texts: Callable[..., Submission]
) -> None:
    submit_texts(place, TEXT, TEXT[:-60])
    assert (kick(place), kick(place), sent(broker)) == (2, 0, 2)

    broker.flushdb()
    broker.rpush(PREFILL_QUEUE, "a message of somebody else")

    assert (kick(place), sent(broker)) == (2, 3)
    assert kick(place) == 0


def test_a_document_whose_prefill_worker_died_is_sent_again_though_others_wait(
    broker: redis.Redis, place: Workplace, submit_texts: Callable[..., Submission]
) -> None:
    submit_texts(place, TEXT)
    kick(place)
    with place.database.writing() as session:
        (document_id,) = session.scalars(select(DocumentRow.document_id)).all()
        fingerprint = place.engine.fingerprint("default", document_id, [1, 2])
        row = find_or_create(session, fingerprint, num_tokens=2, now=utc_now())
        assert claim_writing(session, row.snapshot_id, owner="dead:1:a", now=utc_now(), lease_s=0)

    Upkeep(app, place).once()

    assert sent(broker) == 2


def test_the_broker_inside_a_process_forgets_nothing_before_its_end() -> None:
    assert remembers_since(configure(TaskSettings())) == NEVER
