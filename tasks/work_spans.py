"""The spans of a worker's work: a document read, a snapshot loaded, questions answered."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime

from kernels.decode import DecodeResult
from kernels.prefill import Prefilled
from storage.database import utc_now
from storage.errors import StorageError
from storage.items import OpenItem
from storage.waiting import WaitingJob, waiting_jobs
from storage.ways import Choice, DocumentKey
from tasks import traces
from tasks.loading import LoadedPrefix
from tasks.traces import Span, Value, root_of
from tasks.workplace import Workplace

MOST_JOBS = 32  # that a document read once for all of them is shown for


@contextmanager
def of_waiting(place: Workplace, name: str, key: DocumentKey) -> Iterator[Span]:
    """What the block does for the jobs that wait for the document."""
    jobs = _waiting(place, key) if traces.are_on() else []
    with traces.span(name, *[job.job_id for job in jobs], document_id=key.document_id) as span:
        if jobs:
            span.note(jobs=len(jobs), queue_wait_s=_seconds(min(job.since for job in jobs), utc_now()))
        yield span


def _waiting(place: Workplace, key: DocumentKey) -> list[WaitingJob]:
    with suppress(StorageError), place.database.reading() as session:
        return waiting_jobs(session, **key._asdict(), model=place.engine.name, now=utc_now(), most=MOST_JOBS)
    return []


def note_read(span: Span, done: Prefilled) -> None:
    span.note(tokens_computed=done.computed_tokens, tokens_reused=done.kv.length - done.computed_tokens)


@dataclass
class _Answers:
    """Of the questions that one claim took for one job."""

    span: Span
    job_id: str
    others: list[str]
    left: set[int]
    counts: Counter[str] = field(default_factory=Counter)
    device_s: float = 0.0


@dataclass
class AnswerSpans:
    """Those of one document: for each claim and each job in it one, from the claim to the last answer. The load, where
    there was one, is told with the first answers, for those jobs."""

    prefix: LoadedPrefix
    choice: Choice
    _of_item: dict[int, _Answers] = field(default_factory=dict)
    _is_load_told: bool = False

    def begin(self, items: list[OpenItem]) -> None:
        if not traces.are_on():
            return
        by_job: dict[str, list[OpenItem]] = {}
        for item in items:
            by_job.setdefault(item.job_id, []).append(item)
        for job_id, own in by_job.items():
            span = Span("answer")
            span.note(**self._values(), questions=len(own), batch=len(items), queue_wait_s=self._waited_s(own))
            others = [other for other in by_job if other != job_id][:MOST_JOBS]
            answers = _Answers(span, job_id, others, {item.item_id for item in own})
            self._of_item |= dict.fromkeys(answers.left, answers)

    def end(self, item_id: int, result: DecodeResult) -> None:
        """The item's answer is written. Its snapshot has been proved by now."""
        answers = self._of_item.pop(item_id, None)
        if answers is None:
            return
        answers.left.discard(item_id)
        answers.device_s += result.device_s
        answers.counts["output_tokens"] += len(result.token_ids)
        answers.counts["question_tokens"] += result.question_tokens
        if result.error is not None:
            answers.counts["failed"] += 1
            answers.span.fail(result.error)
        else:
            answers.counts["cancelled" if result.finish == "cancelled" else "answered"] += 1
        if not self._is_load_told:
            self._is_load_told = True
            self._tell_load([answers.job_id, *answers.others])
        if not answers.left:
            _send(answers)

    def release(self, item_ids: Collection[int]) -> None:
        """These are not answered here; of what was not begun, nothing is told."""
        for item_id in item_ids:
            answers = self._of_item.pop(item_id, None)
            if answers is not None:
                answers.left.discard(item_id)
                if not answers.left and answers.counts:
                    _send(answers)

    def close(self, exc: BaseException | None) -> None:
        """What is left goes back to the queue; `exc`: because of this."""
        for answers in {id(each): each for each in self._of_item.values()}.values():
            if exc is not None:
                answers.span.fail(exc)
            _send(answers)
        self._of_item.clear()

    def _values(self) -> dict[str, Value | None]:
        return {
            "document_id": self.prefix.row.document_id,
            "snapshot_id": self.prefix.row.snapshot_id,
            "tokens_reused": self.prefix.kv.length,
            "loaded_from": self.prefix.loaded_from,
            "way": self.choice.way,
            "why": self.choice.why,
        }

    def _waited_s(self, items: list[OpenItem]) -> float:
        """Since the questions were there, and the snapshot."""
        since = min(item.since for item in items)
        return _seconds(max(since, self.prefix.row.ready_at or since), utc_now())

    def _tell_load(self, job_ids: list[str]) -> None:
        prefix = self.prefix
        if prefix.manifest is None:  # it was in memory, or has been read just now
            return
        span = Span("load", began_ns=prefix.began_ns, ended_ns=prefix.began_ns + round(prefix.load_s * 1e9))
        span.note(
            document_id=prefix.row.document_id,
            snapshot_id=prefix.row.snapshot_id,
            tokens=prefix.kv.length,
            bytes=prefix.load_bytes,
            codec=prefix.manifest.codec,
            source=prefix.loaded_from,
        )
        traces.send_shared(span, job_ids)


def _send(answers: _Answers) -> None:
    answers.span.note(**answers.counts, device_s=round(answers.device_s, 6))
    traces.send(answers.span, answers.job_id, [root_of(job_id) for job_id in answers.others])


def _seconds(since: datetime, now: datetime) -> float:
    return round(max(0.0, (now - since).total_seconds()), 3)
