"""A server between a client and a real S3 server on this machine, that answers wrongly for as long as it is told to."""

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

_HOP = {"connection", "expect", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True)
class Fault:
    """What happens to a request: an answer instead of the server's, a pause before it, a body that breaks off, or a
    connection that ends without a word."""

    status: int | None = None
    code: str = "InternalError"
    more: str = ""  # further XML elements of the error
    pause_s: float = 0.0
    is_cut: bool = False
    is_refused: bool = False
    method: str | None = None  # None: of every request


@dataclass
class Faulty:
    """Give `endpoint_url` to the client. Faults end with `heal`, or after `times` requests."""

    upstream: str
    requests: list[str] = field(default_factory=list)
    _fault: Fault | None = None
    _times: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    endpoint_url: str = ""

    def fail(self, fault: Fault, times: int | None = None) -> None:
        with self._lock:
            self._fault, self._times = fault, times

    def heal(self) -> None:
        self.fail(Fault())

    def take(self, method: str, path: str) -> Fault:
        with self._lock:
            self.requests.append(f"{method} {path}")
            fault = self._fault
            if fault is None or fault.method not in (None, method) or self._times == 0:
                return Fault()
            if self._times is not None:
                self._times -= 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty: ClassVar[Faulty]

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.faulty.take(self.command, self.path)
        time.sleep(fault.pause_s)
        if fault.is_refused:
            self.close_connection = True
        elif fault.status is not None:
            error = f"<Error><Code>{fault.code}</Code><Message>told to</Message>{fault.more}</Error>"
            self._answer(fault.status, [("Content-Type", "application/xml")], error.encode())
        else:
            self._pass_on(body, is_cut=fault.is_cut)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815 # the names that http.server looks for

    def _pass_on(self, body: bytes, *, is_cut: bool) -> None:
        # With the client's own Host header: it is among what was signed.
        server = urlsplit(self.faulty.upstream)
        connection = http.client.HTTPConnection(server.hostname or "", server.port)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read(), is_cut=is_cut)
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, is_cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in {*_HOP, "content-length"}:
                self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if is_cut:
            self.close_connection = True
            body = body[: len(body) // 2]
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # as in the base class
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that went away in the middle


@contextmanager
def faulty(upstream: str = "") -> Iterator[Faulty]:
    """Without a server behind it, every request must be told its fault."""
    told = Faulty(upstream)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"faulty": told}))
    told.endpoint_url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
