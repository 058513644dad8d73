"""Traces (OpenTelemetry): what was done for a job, when and for how long, from its submission to its report.

Nothing of them travels in messages: the ids of a job's trace, and of the span of its submission, follow from the job's
id, so every process finds the trace by itself. A span is handed on when it has ended, to be sent in the background.
It holds ids, numbers and words of ours, never text. Without PLATEMAKER_TRACES_URL nothing is imported or kept.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tasks.settings import TaskSettings

Value = bool | int | float | str
NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_WORD = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # an id, or a word of ours


class SpanRef(NamedTuple):
    """`trace_id` of 128 bits, `span_id` of 64."""

    trace_id: int
    span_id: int


def root_of(job_id: str) -> SpanRef:
    """The span of the job's submission, under which all others of its trace are."""
    digest = hashlib.sha256(f"platemaker trace of job {job_id}".encode()).digest()
    return SpanRef(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]))


@dataclass
class Span:
    """Something that takes time: from when this is made until `end`, or until it is sent."""

    name: str
    values: dict[str, Value] = field(default_factory=dict)
    began_ns: int = field(default_factory=time.time_ns)
    ended_ns: int | None = None
    error: str | None = None  # the class of what ended it

    def note(self, **values: Value | None) -> None:
        """Ids, numbers and words of ours; None and any other text are left out."""
        for name, value in values.items():
            if not isinstance(value, str):
                if value is not None:
                    self.values[name] = value
            elif _WORD.fullmatch(value):
                self.values[name] = str(value)  # a member of an enumeration, too

    def fail(self, exc: BaseException) -> None:
        """Notes the class only: a message may hold names."""
        self.error = type(exc).__name__

    def end(self) -> None:
        if self.ended_ns is None:
            self.ended_ns = time.time_ns()


class Sender(Protocol):
    """Sends ended spans, in the background."""

    def send(self, span: Span, *, own: SpanRef | None, parent: SpanRef | None, links: Sequence[SpanRef]) -> SpanRef:
        """Returns the span's ids: `own`, where they are given; else new ones, in the parent's trace."""

    def close(self) -> None:
        """Sends what is left, for a short time."""


_sender: Sender | None = None


def are_on() -> bool:
    return _sender is not None


def are_installed() -> bool:
    try:
        return all(find_spec(name) is not None for name in NEEDED)
    except ModuleNotFoundError:
        return False


@contextmanager
def tracing(settings: "TaskSettings", service: str = "platemaker") -> Iterator[None]:
    """Sends the traces of this process inside the block, where a setting says where to. `service`: what this process
    is called in them."""
    global _sender
    if settings.traces_url is None:
        yield
        return
    from tasks.trace_export import Exporter  # only now: it brings OpenTelemetry

    sender = _sender = Exporter(settings.traces_url, ca_file=settings.tls_ca_file, service=service)
    try:
        yield
    finally:
        _sender = None
        sender.close()


@contextmanager
def span(name: str, *job_ids: str, **values: Value | None) -> Iterator[Span]:
    """What the block does for these jobs; `send_shared`."""
    made = Span(name)
    made.note(**values)
    try:
        yield made
    except BaseException as exc:
        made.fail(exc)
        raise
    finally:
        send_shared(made, job_ids)


def send_root(span: Span, job_id: str) -> None:
    """The job's submission. Once only: its ids are the job's."""
    if _sender is not None:
        _end(span, job_id)
        _sender.send(span, own=root_of(job_id), parent=None, links=())


def send(span: Span, job_id: str, links: Sequence[SpanRef] = ()) -> SpanRef | None:
    """Something that was done for this job. None: traces are off."""
    if _sender is None:
        return None
    _end(span, job_id)
    return _sender.send(span, own=None, parent=root_of(job_id), links=links)


def send_shared(span: Span, job_ids: Sequence[str]) -> None:
    """Something that was done once for all these jobs: it is in the trace of the first, with links to the others. In
    their traces a span of the same time, marked as shared, links to it. Without a job, nothing is sent."""
    if _sender is None or not job_ids:
        return
    first, *others = job_ids
    done = send(span, first, [root_of(job_id) for job_id in others])
    for job_id in others:
        there = Span(span.name, {**span.values, "shared": True}, span.began_ns, span.ended_ns, span.error)
        send(there, job_id, [done] if done else [])


def _end(span: Span, job_id: str) -> None:
    span.end()
    span.note(job_id=job_id)
