"""Metrics that are read from the rows and the broker, for the whole cluster: one exporter serves them."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from celery import Celery
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from storage.breaker import BreakerRule, BreakerState
from storage.database import Database, utc_now
from storage.errors import StorageError
from storage.overview import Overview, overview
from storage.shared_breaker import breaker_states
from tasks.errors import BrokerUnavailable
from tasks.metrics import BREAKER_STATE_HELP, BREAKER_STATE_NAME
from tasks.queue_depth import queue_depths
from tasks.registry import alive_since

KEEP_S = 5.0  # several servers may scrape: the database is asked once


class RowCollector(Collector):
    """What cannot be read is left out, and `platemaker_exporter_up` says so."""

    def __init__(
        self,
        database: Database,
        app: Celery,
        *,
        lease_s: float,
        breaker_rule: BreakerRule,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._app = app
        self._lease_s = lease_s
        self._breaker_rule = breaker_rule
        self._clock = clock
        self._read: list[Metric] = []
        self._read_at: float | None = None

    def collect(self) -> Iterator[Metric]:
        now = self._clock()
        if self._read_at is None or now - self._read_at > KEEP_S:
            self._read, self._read_at = list(self._ask()), now
        yield from self._read

    def _ask(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("platemaker_exporter_up", "Whether it could be read from.", labels=["source"])
        rows: Overview | None = None
        breakers: dict[str, BreakerState] = {}
        with suppress(StorageError), self._database.reading() as session:
            now = utc_now()
            breakers = breaker_states(session, self._breaker_rule, now)
            rows = overview(session, now=now, workers_seen_after=alive_since(now, self._lease_s))
        up.add_metric(["database"], rows is not None)
        depths: dict[str, int] | None = None
        with suppress(BrokerUnavailable):
            depths = queue_depths(self._app)
        up.add_metric(["broker"], depths is not None)
        yield up
        if depths is not None:
            yield _gauges("platemaker_queue_messages", "Messages that no worker has taken.", "queue", depths)
        if rows is not None:
            yield from _row_metrics(rows)
            states = {name: state.number for name, state in breakers.items()}
            yield _gauges(BREAKER_STATE_NAME, BREAKER_STATE_HELP, "breaker", states)


def _row_metrics(rows: Overview) -> Iterator[Metric]:
    yield _gauges("platemaker_items", "Items (document × question) by state.", "state", rows.items)
    yield GaugeMetricFamily("platemaker_open_jobs", "Jobs that have not ended.", value=rows.open_jobs)
    oldest = {"read": rows.oldest_reading_s, "answer": rows.oldest_answering_s}
    yield _gauges(
        "platemaker_oldest_waiting_seconds", "Age of the oldest job that waits for this.", "waits_for", oldest
    )
    yield from _unit_metrics(rows)
    yield _gauges("platemaker_snapshots", "Snapshots by state.", "state", rows.snapshots)
    yield _gauges("platemaker_snapshot_bytes", "Bytes of snapshots by state.", "state", rows.snapshot_bytes)
    yield _gauges("platemaker_leases", "What workers hold now: items, snapshots they write or read.", "of", rows.leases)
    yield _gauges("platemaker_workers", "Workers that said they are alive.", "pool", rows.workers)
    readings = CounterMetricFamily(
        "platemaker_readings", "Documents of jobs, by how their snapshot was come by.", labels=["way"]
    )
    for way, count in rows.readings.items():
        readings.add_metric([way], count)
    yield readings
    tokens = CounterMetricFamily("platemaker_reading_tokens", "Prefix tokens of those.", labels=["source"])
    tokens.add_metric(["computed"], rows.computed_tokens)
    tokens.add_metric(["reused"], rows.reused_tokens)
    yield tokens


def _unit_metrics(rows: Overview) -> Iterator[Metric]:
    labels = ["stage", "tier"]
    waiting = GaugeMetricFamily("platemaker_waiting_documents", "Documents that wait for a worker.", labels=labels)
    oldest = GaugeMetricFamily(
        "platemaker_waiting_document_seconds", "How long the oldest of those has waited.", labels=labels
    )
    for kind, (count, oldest_s) in rows.units.items():
        waiting.add_metric(kind, count)
        oldest.add_metric(kind, oldest_s)
    yield waiting
    yield oldest


def _gauges(name: str, text: str, label: str, values: Mapping[str, int] | Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def row_registry(database: Database, app: Celery, *, lease_s: float, breaker_rule: BreakerRule) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RowCollector(database, app, lease_s=lease_s, breaker_rule=breaker_rule, clock=time.monotonic))
    return registry
