"""Running schedules: what is due and lies within sight becomes a job, once."""

import logging
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import select

from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.counting import CHARS_PER_TOKEN
from pipeline.documents import ReadOptions, Split
from pipeline.errors import PipelineError, ScheduleError
from pipeline.nightly.occurrences import Occurrence, last_due, time_zone
from pipeline.nightly.sources import is_visible, sources_of
from pipeline.questions import Question, load_questions
from pipeline.settings import PipelineSettings
from pipeline.splitting import Splitter, splitter
from pipeline.submit import submit
from pipeline.words import duration
from storage.database import Database, utc_now
from storage.errors import KeyTaken, ObjectStoreError, QueueFull
from storage.jobs import JobTimes
from storage.objects import ObjectStore
from storage.rates import measured_rates, ready_documents
from storage.schedules import claim_run, finish_run, give_back_run, list_schedules, new_work, postpone_run
from storage.schema import JobRow, ScheduleRow
from storage.settings import StorageSettings
from storage.tiers import Tier

logger = logging.getLogger(__name__)
LEASE_S = 900.0  # reading a night's files takes its time; a second submission would find the first by its key
AGAIN_S = 300.0  # a run that was refused tries again so much later
ANSWERS, PREFILL, MANUAL = "answers", "prefill", "manual"


@dataclass(frozen=True)
class Ran:
    """What one run did. `job_id` None: nothing could be submitted, and `error` says why."""

    schedule: str
    occurrence: str
    kind: str
    job_id: str | None
    documents: int = 0
    new_items: int = 0
    carried_items: int = 0
    expected_finish_at: datetime | None = None
    warning: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Nightly:
    """Runs the schedules of one tenant on this machine."""

    database: Database
    store: ObjectStore
    settings: PipelineSettings
    storage: StorageSettings

    def tick(self, now: datetime) -> list[Ran]:
        """Submits the newest occurrence of each schedule that is due, was not submitted, and whose files lie here.

        What was missed before that one is not made up for. Any number of processes may do this at the same time.
        """
        with self.database.reading() as session:
            schedules = [row for row in list_schedules(session, self.settings.tenant) if row.paused_at is None]
        done = []
        for schedule in schedules:
            for kind, line in ((PREFILL, schedule.prefill_at), (ANSWERS, schedule.at)):
                due = last_due(line, time_zone(schedule.time_zone), now) if line else None
                if due is None or due.due_at < schedule.active_since:
                    continue
                if not is_visible(schedule.source, schedule.questions):
                    continue  # another machine's
                ran = self.run(schedule, kind, due, now)
                done += [ran] if ran else []
        return done

    def run_now(self, schedule: ScheduleRow, now: datetime) -> Ran:
        """Submits the schedule besides its times.

        Raises:
            QueueFull: too much is queued already.
        """
        occurrence = Occurrence(now.isoformat(timespec="seconds").removesuffix("+00:00"), now)
        ran = self.run(schedule, MANUAL, occurrence, now)
        assert ran is not None, "an occurrence of this second was there already"
        return ran

    def run(self, schedule: ScheduleRow, kind: str, due: Occurrence, now: datetime) -> Ran | None:
        """None: the occurrence is submitted, or somebody is at it."""
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        with self.database.writing() as session:
            run_id = claim_run(
                session,
                schedule.schedule_id,
                kind=kind,
                occurrence=due.name,
                due_at=due.due_at,
                owner=owner,
                now=now,
                lease_s=LEASE_S,
            )
        if run_id is None:
            return None
        try:
            ran = self._submit(schedule, kind, due, now)
        except QueueFull as exc:
            logger.warning("schedule %s: %s", schedule.name, exc)
            with self.database.writing() as session:
                postpone_run(session, run_id, owner, str(exc), again_at=utc_now() + timedelta(seconds=AGAIN_S))
            if kind == MANUAL:
                raise
            return Ran(schedule.name, due.name, kind, None, error=str(exc))
        except PipelineError as exc:
            ran = Ran(schedule.name, due.name, kind, None, error=str(exc))
        except BaseException:
            with self.database.writing() as session:
                give_back_run(session, run_id, owner)
            raise
        values = {name: value for name, value in vars(ran).items() if name not in ("schedule", "occurrence", "kind")}
        with self.database.writing() as session:
            finish_run(session, run_id, owner, utc_now(), **values)
        if ran.warning or ran.error:
            logger.warning("schedule %s: %s", schedule.name, ran.warning or ran.error)
        return ran

    def _submit(self, schedule: ScheduleRow, kind: str, due: Occurrence, now: datetime) -> Ran:
        answer_by = None
        if schedule.answer_by_s is not None and kind != PREFILL:
            answer_by = due.due_at + timedelta(seconds=schedule.answer_by_s)
            if answer_by <= now:
                return Ran(schedule.name, due.name, kind, None, error="Missed: nothing ran it until its answer-by.")
        questions = load_questions([Path(schedule.questions)], [], schedule.variables)
        options = GenerationParams.checked(**schedule.params)
        key = f"nightly:{schedule.schedule_id}:{kind}:{due.name}"
        try:
            made = submit(
                self.database,
                self.store,
                settings=self.settings,
                model=schedule.model,
                files=sources_of(schedule.source, self.settings, self.storage),
                questions=[] if kind == PREFILL else questions,
                options=options,
                reading=ReadOptions.of(schedule.reading),
                title=f"{schedule.name} {due.name}",
                client_key=key,
                times=JobTimes(answer_by=answer_by),
                tier=Tier(schedule.tier),
                limits=self.storage.limits,
                reuse_answers=True,
                only_prefill=kind == PREFILL,
                splitter=_splitter(schedule, questions, options),
            )
            job_id, documents = made.job_id, made.documents
        except KeyTaken as exc:  # somebody submitted it before the files changed
            job_id, documents = exc.job_id, 0
        except ObjectStoreError as exc:
            if exc.retryable:
                raise
            return Ran(schedule.name, due.name, kind, None, error=str(exc))
        return self._estimated(schedule, kind, due, job_id, documents, answer_by)

    def _estimated(
        self,
        schedule: ScheduleRow,
        kind: str,
        due: Occurrence,
        job_id: str,
        documents: int,
        answer_by: datetime | None,
    ) -> Ran:
        with self.database.reading() as session:
            work = new_work(session, job_id)
            rates = measured_rates(session, schedule.tenant, schedule.model)
            ready = ready_documents(session, schedule.tenant, schedule.model, list(work.documents))
            created_at = session.scalars(select(JobRow.created_at).where(JobRow.job_id == job_id)).one()
        chars = sum(count for document_id, count in work.documents.items() if document_id not in ready)
        seconds = rates.seconds(round(chars / CHARS_PER_TOKEN), work.items)
        finish = None if seconds is None or kind == PREFILL else created_at + timedelta(seconds=seconds)
        warning = None
        if finish is not None and answer_by is not None and finish > answer_by:
            late_s = (finish - answer_by).total_seconds()
            warning = (
                f"The night is too short: about {duration(seconds or 0)} of work, {duration(late_s)} more than until "
                "its answer-by. What is not answered then, expires."
            )
        return Ran(schedule.name, due.name, kind, job_id, documents, work.items, work.answered_before, finish, warning)


def _splitter(schedule: ScheduleRow, questions: list[Question], options: GenerationParams) -> Splitter | None:
    """The same for reading beforehand and for the answers, so that both cut the same sections.

    Raises:
        ScheduleError: this machine is set to another model.
        SplitNeedsModel, NoRoomForSections: see `splitter`.
    """
    split, kernel = Split(schedule.split), KernelSettings()
    if split != Split.REFUSE and kernel.model_name != schedule.model:
        raise ScheduleError(
            f"sections are counted with the tokenizer of {schedule.model}, and PLATEMAKER_MODEL is {kernel.model_name} "
            "here; set it to the schedule's model"
        )
    return splitter(split, kernel, questions, options)
