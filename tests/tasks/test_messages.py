"""What a worker does with messages that are none of ours: one line each, off the queue, and it goes on."""

import base64
import json
import logging
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from celery.contrib.testing.worker import start_worker
from pydantic import SecretStr

from pipeline.local_servers import Valkey
from storage.database import utc_now
from storage.workers import add_ping, answered_pings
from tasks.app import app, configure
from tasks.messages import MessageRefused, check_arguments
from tasks.settings import TaskSettings
from tasks.workplace import Workplace

DECODE_QUEUE = "decode.batch"

TOLD = "SECRET-TEXT-OF-A-CONTRACT"
WAIT_S = 60


def decode(snapshot_id: int) -> None: ...


def prefill(tenant: str, document_id: str) -> None: ...


@pytest.mark.parametrize(("task", "args"), [(decode, (7,)), (prefill, ("acme", "d" * 64)), (decode, (2**63 - 1,))])
def test_ids_are_taken(task: Any, args: tuple[Any, ...]) -> None:
    check_arguments(task, args, {})


@pytest.mark.parametrize(
    ("task", "args", "kwargs"),
    [
        (decode, (), {}),
        (decode, (1, 2), {}),
        (decode, (), {"other": 1}),
        (decode, (TOLD,), {}),
        (decode, (True,), {}),
        (decode, (0,), {}),
        (decode, (2**63,), {}),
        (decode, (1.0,), {}),
        (decode, (None,), {}),
        (decode, ([1],), {}),
        (prefill, ("acme", 7), {}),
        (prefill, ("acme", ""), {}),
        (prefill, ("acme", "d\0"), {}),
        (prefill, ("acme", TOLD + "\n"), {}),
        (prefill, ("acme", "d" * 256), {}),
        (prefill, ("acme",), {"document_id": {"$ne": TOLD}}),
    ],
)
def test_anything_else_is_refused_and_not_repeated(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(MessageRefused) as caught:
        check_arguments(task, args, kwargs)

    assert TOLD not in str(caught.value) and caught.value.__cause__ is None


def message(task: str | None, args: Any, *, body: bytes | None = None, **changes: Any) -> str:
    """As Celery puts it into a list of Redis."""
    embedded = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    task_id = str(uuid.uuid4())
    headers = {"lang": "py", "task": task, "id": task_id, "root_id": task_id, "parent_id": None, "group": None}
    headers |= {"retries": 0, "eta": None, "expires": None, "timelimit": [None, None], "argsrepr": "", "kwargsrepr": ""}
    properties = {"correlation_id": task_id, "delivery_mode": 2, "priority": 0, "body_encoding": "base64"}
    properties |= {"delivery_tag": task_id, "delivery_info": {"exchange": "", "routing_key": DECODE_QUEUE}}
    whole = {
        "body": base64.b64encode(json.dumps([args, {}, embedded]).encode() if body is None else body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": properties,
    }
    return json.dumps(whole | changes)


PICKLE = {"content-type": "application/x-python-serialize", "content-encoding": "binary"}
STRANGE = {
    "unknown task": message("platemaker.nosuch", [TOLD]),
    "no task": message(None, [TOLD]),
    "wrong type": message("platemaker.decode", [TOLD]),
    "wrong number": message("platemaker.decode", [1, 2, TOLD]),
    "pickle": message("platemaker.decode", [1], body=pickle.dumps([[TOLD], {}, {}]), **PICKLE),
    "no JSON": message("platemaker.decode", [1], body=b"{" + TOLD.encode()),
    "text": message("platemaker.decode", [1], body=json.dumps(TOLD).encode()),
    "args no list": message("platemaker.decode", TOLD),
    "no headers": message("platemaker.decode", [1], headers={}),
    "headers are null": message("platemaker.decode", [1], headers=None),
    "no id": message("platemaker.decode", [1], headers={"task": "platemaker.decode"}),
    "wrong time": message("platemaker.decode", [1], headers={"task": "platemaker.decode", "id": "x", "eta": TOLD}),
    "no message": json.dumps({"note": TOLD}),
    "list": json.dumps([TOLD]),
    "no JSON at all": TOLD,
}


@pytest.fixture
def broker(valkey_server: Valkey) -> Iterator[redis.Redis]:
    """A database of its own on the broker; the app is given back its embedded one."""
    url = f"{valkey_server.url.rpartition('/')[0]}/15"
    configure(TaskSettings(broker_url=SecretStr(url)))
    with closing(redis.Redis.from_url(url)) as client:
        client.flushdb()
        yield client
    configure(TaskSettings())


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a worker that ends leaves its sockets to the collector
def test_no_message_ends_a_worker_or_shows_in_its_log(
    broker: redis.Redis, open_place: Callable[..., Workplace], caplog: pytest.LogCaptureFixture
) -> None:
    place = open_place()
    app.workplace = place
    with place.database.writing() as session:
        ping_id = add_ping(session, DECODE_QUEUE, now=utc_now())
    for strange in STRANGE.values():
        broker.lpush(DECODE_QUEUE, strange)
    app.send_task("platemaker.ping", args=[ping_id], queue=DECODE_QUEUE)
    options = {"queues": [DECODE_QUEUE]}
    with (
        caplog.at_level(logging.INFO),
        start_worker(app, pool="threads", concurrency=1, perform_ping_check=False, **options),
    ):
        began = time.monotonic()
        answers: dict[str, Any] = {}
        while not answers:
            assert time.monotonic() - began < WAIT_S, "the worker does not answer"
            time.sleep(0.05)
            with place.database.reading() as session:
                answers = answered_pings(session, [ping_id])

    refused = [record for record in caplog.records if record.getMessage().startswith("Message refused: ")]
    assert len(refused) == len(STRANGE)
    assert all("\n" not in record.getMessage() and record.exc_info is None for record in refused)
    assert TOLD not in caplog.text and "Traceback" not in caplog.text
    assert broker.llen(DECODE_QUEUE) == 0 and broker.hlen("unacked") == 0
