"""A collector of traces: takes what is posted over OTLP/HTTP, and tells it again span by span."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tasks.traces import SpanRef


@dataclass(frozen=True)
class Received:
    """A span as it came, its attributes without their prefix. `error`: the message of its status; None: it is fine."""

    service: str
    name: str
    ref: SpanRef
    parent_id: int
    links: list[SpanRef]
    values: dict[str, Any]
    error: str | None
    began_ns: int
    ended_ns: int


class Collector:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answers = threading.Event()  # cleared: it takes what comes, and keeps who sent it waiting
        self.answers.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                collector.answers.wait()
                body = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def spans(self) -> list[Received]:
        """In the order in which they began."""
        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                found += [_received(service, span) for scope in resource.scope_spans for span in scope.spans]
        return sorted(found, key=lambda span: span.began_ns)


def _received(service: str, span: Any) -> Received:
    values = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        values[attribute.key.removeprefix("platemaker.")] = getattr(attribute.value, kind)
    return Received(
        service,
        span.name,
        SpanRef(int.from_bytes(span.trace_id), int.from_bytes(span.span_id)),
        int.from_bytes(span.parent_span_id),
        [SpanRef(int.from_bytes(link.trace_id), int.from_bytes(link.span_id)) for link in span.links],
        values,
        span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()
