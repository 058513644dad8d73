"""Spans on their way to a collector, by OTLP over HTTP (extra `traces`). Imported only where traces are on."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from tasks.registry import worker_name
from tasks.traces import Span, SpanRef

logger = logging.getLogger(__name__)
PREFIX = "platemaker."  # of the names of attributes
SEND_S = 3  # for one request with its repetitions
CLOSE_S = 2.0  # at the end of a process


class Exporter:
    """A `Sender`. What a collector does not take within some seconds is dropped, and so is what does not fit into the
    queue before it."""

    def __init__(self, url: str, *, ca_file: Path | None, service: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each failure; one says it here
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": service, "service.instance.id": worker_name(os.getpid())}),
            shutdown_on_exit=False,  # it would wait for a collector that does not answer
            id_generator=self._ids,
        )
        self._connection = _Connection()
        sender = OTLPSpanExporter(
            url, certificate_file=str(ca_file) if ca_file else None, timeout=SEND_S, session=self._connection
        )
        self._connection.give_up = sender.shutdown
        self._provider.add_span_processor(BatchSpanProcessor(_Telling(sender)))
        self._tracer = self._provider.get_tracer("platemaker", version("platemaker"))

    def send(self, span: Span, *, own: SpanRef | None, parent: SpanRef | None, links: Sequence[SpanRef]) -> SpanRef:
        self._ids.wanted = own
        sent = self._tracer.start_span(
            span.name,
            context=Context() if parent is None else set_span_in_context(NonRecordingSpan(_context(parent)), Context()),
            links=[Link(_context(link)) for link in links],
            start_time=span.began_ns,
            attributes={PREFIX + name: value for name, value in span.values.items()},
        )
        self._ids.wanted = None
        if span.error is not None:
            sent.set_attribute("error.type", span.error)
            sent.set_status(Status(StatusCode.ERROR, span.error))
        sent.end(span.ended_ns)
        made = sent.get_span_context()
        return SpanRef(made.trace_id, made.span_id)

    def close(self) -> None:
        self._connection.close_down()
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _Ids(RandomIdGenerator, threading.local):
    """Gives the thread's next span the ids that are wanted for it."""

    wanted: SpanRef | None = None

    def generate_trace_id(self) -> int:
        return self.wanted.trace_id if self.wanted else super().generate_trace_id()

    def generate_span_id(self) -> int:
        return self.wanted.span_id if self.wanted else super().generate_span_id()


class _Connection(requests.Session):  # type: ignore[misc] # requests is untyped
    """Where nobody listens, the exporter tries again for seconds. At the end of a process it is told to give up."""

    def __init__(self) -> None:
        super().__init__()
        self.give_up: Callable[[], None] = lambda: None
        self._is_refused = self._is_closing = False

    def send(self, request: Any, **options: Any) -> Any:
        try:
            answer = super().send(request, **options)
        except requests.ConnectionError:
            self._is_refused = True
            if self._is_closing:
                self.give_up()
            raise
        self._is_refused = False
        return answer

    def close_down(self) -> None:
        self._is_closing = True
        if self._is_refused:
            self.give_up()


class _Telling(SpanExporter):
    """Logs when the collector begins to refuse, and when it takes again."""

    def __init__(self, sender: SpanExporter) -> None:
        self._sender = sender
        self._is_refused = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._sender.export(spans)
        except Exception:  # older versions raise what the connection raised
            result = SpanExportResult.FAILURE
        is_refused = result != SpanExportResult.SUCCESS
        if is_refused and not self._is_refused:
            logger.warning("traces cannot be sent to PLATEMAKER_TRACES_URL and are dropped until they can")
        elif self._is_refused and not is_refused:
            logger.warning("traces are sent again")
        self._is_refused = is_refused
        return result

    def shutdown(self) -> None:
        self._sender.shutdown()


def _context(span: SpanRef) -> SpanContext:
    return SpanContext(span.trace_id, span.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
