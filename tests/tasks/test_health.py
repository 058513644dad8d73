import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
from celery.signals import worker_ready

from storage.errors import StoreUnavailable
from tasks import health
from tasks.errors import PortTaken
from tasks.health import Health, HttpServer
from tasks.metrics import REGISTRY
from tasks.workplace import Workplace


class Loop:
    """A worker's loop whose ticks the test gives."""

    def __init__(self) -> None:
        self.tick: Callable[[], None] = lambda: None
        self.timer = SimpleNamespace(call_repeatedly=self._keep)

    def _keep(self, pause_s: float, tick: Callable[[], None]) -> None:
        self.tick = tick


@pytest.fixture
def told(place: Workplace) -> Iterator[Health]:
    with closing(Health(place)) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(health.time, "monotonic", lambda: made.now)
    return made


def test_a_worker_is_ready_while_its_loop_turns_and_its_rows_answer(
    told: Health, place: Workplace, clock: SimpleNamespace
) -> None:
    loop = Loop()
    assert told.live().ok and told.ready().reason == "starting"

    worker_ready.send(loop)
    assert told.ready().ok
    clock.now += health.READY_WITHIN_S + 1
    assert not told.ready().ok and told.live().ok
    loop.tick()
    assert told.ready().ok

    place.outage = StoreUnavailable()
    assert not told.ready().ok and "object store" in told.ready().reason
    place.outage = None
    place.drain()
    assert told.ready().reason == "stopping" and told.live().ok


def test_a_worker_that_stands_still_longer_than_any_task_is_not_alive(
    told: Health, place: Workplace, clock: SimpleNamespace
) -> None:
    worker_ready.send(Loop())
    clock.now += place.settings.longest_task_s + 1

    assert not told.live().ok


def asked(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as exc:
        with closing(exc):
            return exc.code, exc.read()


def test_over_http_the_status_says_it_and_only_known_paths_answer(told: Health) -> None:
    with closing(HttpServer("127.0.0.1", 0, REGISTRY, told)) as server:
        server.start()

        status, body = asked(f"{server.url}/ready")
        assert (status, json.loads(body)) == (503, {"ok": False, "reason": "starting"})
        assert asked(f"{server.url}/live")[0] == 200
        assert asked(f"{server.url}/../etc/passwd")[0] == 404
        status, body = asked(f"{server.url}/metrics")
        assert status == 200 and b"# TYPE platemaker_snapshot_hits_total counter" in body


def test_a_port_that_is_taken_names_the_setting() -> None:
    with closing(HttpServer("127.0.0.1", 0, REGISTRY)) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(PortTaken, match="PLATEMAKER_METRICS_PORT"):
            HttpServer("127.0.0.1", port, REGISTRY)
