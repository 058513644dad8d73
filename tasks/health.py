"""/metrics, /live and /ready of a worker, and /metrics of the exporter, over HTTP."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from celery.signals import worker_ready
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from storage.errors import StorageError
from tasks.errors import PortTaken

if TYPE_CHECKING:
    from tasks.workplace import Workplace  # brings torch, which an exporter need not have

TICK_S = 1.0
READY_WITHIN_S = 15.0  # a loop that has not turned for so long takes no messages


class Verdict(NamedTuple):
    ok: bool
    reason: str


class Health:
    """What a worker knows of itself. The loop that takes messages ticks; where it stands still, nothing is taken, be
    it that the broker is away or that the worker is stuck."""

    def __init__(self, place: "Workplace") -> None:
        self._place = place
        self._ticked_at: float | None = None
        worker_ready.connect(self._begin, weak=False)

    def close(self) -> None:
        worker_ready.disconnect(self._begin)

    def _begin(self, sender: object, **_: object) -> None:
        self._tick()
        sender.timer.call_repeatedly(TICK_S, self._tick)  # type: ignore[attr-defined] # Celery's Consumer

    def _tick(self) -> None:
        self._ticked_at = time.monotonic()

    def _still_s(self) -> float | None:
        return None if self._ticked_at is None else time.monotonic() - self._ticked_at

    def live(self) -> Verdict:
        """False: start it again. The broker's absence alone is no reason before the longest task's time is over."""
        still_s = self._still_s()
        if still_s is not None and still_s > self._place.settings.longest_task_s:
            return Verdict(False, f"no message could be taken for {still_s:.0f} s")
        return Verdict(True, "alive")

    def ready(self) -> Verdict:
        """False: it takes no work now."""
        still_s = self._still_s()
        if not self._place.may_claim():
            return Verdict(False, "stopping")
        if still_s is None:
            return Verdict(False, "starting")
        if still_s > READY_WITHIN_S:
            return Verdict(False, f"no message could be taken for {still_s:.0f} s")
        if self._place.outage is not None:
            return Verdict(False, str(self._place.outage))
        try:
            self._place.database.check_schema()
        except StorageError as exc:
            return Verdict(False, str(exc))
        return Verdict(True, "takes work")


class HttpServer:
    """Serves on threads of its own until it is closed. Raises PortTaken."""

    def __init__(self, address: str, port: int, registry: CollectorRegistry, health: Health | None = None) -> None:
        checks: dict[str, Callable[[], Verdict]] = {}
        if health is not None:
            checks = {"/live": health.live, "/ready": health.ready}
        handler = type("Handler", (_Handler,), {"registry": registry, "checks": checks})
        try:
            self._server = ThreadingHTTPServer((address, port), handler)
        except OSError as exc:
            raise PortTaken(address, port) from exc
        self.url = f"http://{address}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def serve_forever(self) -> None:
        self._server.serve_forever()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    registry: ClassVar[CollectorRegistry]
    checks: ClassVar[dict[str, Callable[[], Verdict]]]
    timeout = 10

    def do_GET(self) -> None:  # http.server's name
        if self.path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, generate_latest(self.registry))
        elif self.path in self.checks:
            verdict = self.checks[self.path]()
            body = json.dumps(verdict._asdict()).encode() + b"\n"
            self._answer(200 if verdict.ok else 503, "application/json", body)
        else:
            self._answer(404, "text/plain", b"/metrics, /live, /ready\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # http.server's name
        """Scrapes are no news."""
