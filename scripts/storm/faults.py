"""What is done to the crew. Each begins at once and is then looked at until the disturbance is over."""

import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, ClassVar

import redis
from kombu.exceptions import OperationalError
from sqlalchemy import select

from pipeline.local_servers import LocalServer
from storage.schema import DocumentRow, SnapshotRow
from storage.tiers import Stage, Tier
from storm.crew import Crew, Worker
from tasks.queues import ALL_QUEUES, queue_of

STORE_AWAY_S = 15.0
MOST_REPEATED = 5  # documents whose messages are sent once more


class NobodyThere(Exception):
    """No worker that it could be done to; it is tried again a little later."""


class Fault(ABC):
    """`victim`: the worker that it befalls, if it is one's own fault and not a server's."""

    name: ClassVar[str]

    def __init__(self, crew: Crew, draw: random.Random) -> None:
        self.crew = crew
        self.draw = draw
        self.victim: Worker | None = None

    @abstractmethod
    def begin(self) -> None:
        """
        Raises:
            NobodyThere: not now.
        """

    def is_over(self) -> bool:
        return True

    def choose(self) -> Worker:
        if not (found := self.crew.choosable()):
            raise NobodyThere
        self.victim = self.draw.choice(found)
        return self.victim


class Kill(Fault):
    """SIGKILL to a worker; another is started."""

    name = "kill"

    def begin(self) -> None:
        victim = self.choose()
        victim.end()
        self.crew.replace(victim)


class Freeze(Fault):
    """SIGSTOP to a worker until its leases have run out, then SIGCONT."""

    name = "freeze"

    def begin(self) -> None:
        victim = self.choose()
        victim.send(signal.SIGSTOP)
        victim.is_frozen = True
        self._until = time.monotonic() + 1.5 * self.crew.lease_s

    def is_over(self) -> bool:
        assert self.victim is not None
        if time.monotonic() < self._until:
            return False
        self.victim.send(signal.SIGCONT)
        self.victim.is_frozen = False
        return True


class Stop(Fault):
    """SIGTERM to a worker, which has to end with status 0; another is started."""

    name = "stop"

    def begin(self) -> None:
        victim = self.choose()
        self.crew.dismiss(victim)
        self.crew.launch(victim.pool)

    def is_over(self) -> bool:
        assert self.victim is not None
        return self.crew.see_off(self.victim)


class ServerAway(Fault):
    """A server that is ended and started again `away_s` later, with what it has on disk."""

    away_s: ClassVar[float] = 0.0

    @property
    @abstractmethod
    def server(self) -> LocalServer: ...

    def end_server(self) -> None:
        self.server.kill()

    def begin(self) -> None:
        self.end_server()
        self._again_at = time.monotonic() + self.away_s
        self._is_back = False

    def is_over(self) -> bool:
        if not self._is_back and time.monotonic() >= self._again_at:
            self.server.launch()
            self._is_back = True
        return self._is_back and self.server.is_ready()


class BrokerRestart(ServerAway):
    """The broker keeps nothing on disk, so every message is lost."""

    name = "broker restart"

    @property
    def server(self) -> LocalServer:
        return self.crew.broker


class StoreAway(ServerAway):
    name = "store away"
    away_s = STORE_AWAY_S

    @property
    def server(self) -> LocalServer:
        return self.crew.store_server


class DatabaseRestart(ServerAway):
    """A fast shutdown, which cuts off every transaction."""

    name = "database restart"

    @property
    def server(self) -> LocalServer:
        return self.crew.database_server

    def end_server(self) -> None:
        self.server.stop()


class BrokerFlush(Fault):
    """The broker forgets everything, and its connections stay."""

    name = "broker flush"

    def begin(self) -> None:
        with closing(redis.Redis.from_url(self.crew.broker.url)) as client, suppress(redis.RedisError):
            client.flushall()


class Repeat(Fault):
    """Every waiting message twice and in another order, and once more what was sent for some documents long ago."""

    name = "messages twice"

    def begin(self) -> None:
        with closing(redis.Redis.from_url(self.crew.broker.url)) as client, suppress(redis.RedisError):
            for queue in ALL_QUEUES:
                self._shuffle(client, queue)
        with self.crew.database.reading() as session:
            documents = session.execute(select(DocumentRow.tenant, DocumentRow.document_id)).all()
            snapshots = session.scalars(select(SnapshotRow.snapshot_id)).all()
        app = self.crew.app
        with suppress(OperationalError):
            for document in self._some(documents):
                app.send_task("platemaker.prefill", args=[*document], queue=queue_of(Stage.READ, Tier.BATCH))
            for snapshot_id in self._some(snapshots):
                app.send_task("platemaker.decode", args=[snapshot_id], queue=queue_of(Stage.ANSWER, Tier.BATCH))

    def _shuffle(self, client: redis.Redis, queue: str) -> None:
        with suppress(redis.ResponseError):  # nothing waits
            client.rename(queue, "shuffled")
            messages = 2 * client.lrange("shuffled", 0, -1)
            self.draw.shuffle(messages)
            client.rpush(queue, *messages)
            client.delete("shuffled")

    def _some(self, found: Sequence[Any]) -> list[Any]:
        return self.draw.sample(found, min(MOST_REPEATED, len(found)))


Plan = list[tuple[float, type[Fault]]]  # seconds from the first submission

FAULTS: tuple[type[Fault], ...] = (
    Kill,
    Freeze,
    Stop,
    BrokerRestart,
    BrokerFlush,
    StoreAway,
    DatabaseRestart,
    Repeat,
)


def plan(draw: random.Random, kinds: Sequence[type[Fault]], *, seconds: float, every_s: float) -> Plan:
    """When which fault begins: each kind once, and a kill in every other place, in an order that the seed decides."""
    places = max(len(kinds), int(seconds / every_s))
    chosen: list[type[Fault]] = [*kinds, *[Kill] * (places - len(kinds))]
    draw.shuffle(chosen)
    width = seconds / places
    return [((at + draw.uniform(0.1, 0.9)) * width, kind) for at, kind in enumerate(chosen)]
