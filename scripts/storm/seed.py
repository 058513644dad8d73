"""One seed: documents come in, faults befall the crew, and what is left is looked at."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from kernels.params import GenerationParams
from pipeline.questions import Question
from pipeline.settings import PipelineSettings
from pipeline.submit import submit
from storage.errors import StorageError
from storage.schema import JobRow
from storm.checks import Answers, Findings, find, leases_left
from storm.crew import Crew
from storm.faults import NobodyThere, Plan, ServerAway
from storm.incidents import Incident
from tasks.errors import BrokerUnavailable
from tasks.upkeep import kick_waiting

PORTIONS = 4  # jobs, submitted one after the other while the storm goes on
READY_S = 180.0
FINISH_S = 300.0  # longest from the last fault until every row has ended
LOOK_S = 0.2


class Work(NamedTuple):
    documents: Sequence[Path]
    questions: list[Question]
    options: GenerationParams
    model: str
    undisturbed: Answers

    @property
    def num_rows(self) -> int:
        return len(self.documents) * len(self.questions)


@dataclass
class Outcome:
    """`tail_s`: from the end of the last fault until the last row ended. `ended_alone`: workers that gave up by
    themselves."""

    seed: int
    incidents: list[Incident]
    findings: Findings
    wall_s: float
    tail_s: float
    ended_alone: list[str]

    @property
    def worst_recovery_s(self) -> float:
        return max((each.recovered_s or 0.0 for each in self.incidents), default=0.0)

    @property
    def unrecovered(self) -> int:
        """Faults behind which nothing went on, although something waited."""
        return sum(not each.is_settled for each in self.incidents)

    @property
    def all_hold(self) -> bool:
        return self.findings.all_hold and not self.unrecovered


class Storm:
    """Begins when all workers are ready, and ends when everything was done and every row has ended, or too late."""

    def __init__(self, crew: Crew, work: Work, planned: Plan, draw: random.Random, seconds: float) -> None:
        self.incidents: list[Incident] = []
        self.tail_s = 0.0
        self._crew = crew
        self._work = work
        self._draw = draw
        self._planned = list(planned)
        self._raging: list[Incident] = []
        self._due = [work.documents[at::PORTIONS] for at in range(PORTIONS)]
        self._per_portion = len(planned) / PORTIONS
        self._num_jobs = PORTIONS
        self._ends_s = seconds

    def run(self, tell: Callable[[Incident], None]) -> None:
        began, over_s = time.monotonic(), 0.0
        while (at_s := time.monotonic() - began) < self._ends_s + FINISH_S:
            self._submit()
            self._begin(at_s)
            if self._end():
                over_s = time.monotonic() - began
                self._ends_s = max(self._ends_s, over_s)
            self._crew.tend()
            self.tail_s = at_s - over_s
            with suppress(StorageError):  # then nothing can be said in this round
                if self._look(tell) and not (self._due or self._planned or self._raging):
                    return
            time.sleep(LOOK_S)

    def _submit(self) -> None:
        """The next portion where its share of the faults has begun: so that each of them has work to befall."""
        number = self._num_jobs - len(self._due)
        if self._due and len(self.incidents) >= number * self._per_portion:
            # Under a key of its own: where the store or the database goes away meanwhile, it is done again whole.
            with suppress(StorageError):
                submit(
                    self._crew.database,
                    self._crew.store,
                    settings=PipelineSettings(parse_workers=1),
                    model=self._work.model,
                    files=self._due[0],
                    questions=self._work.questions,
                    options=self._work.options,
                    client_key=f"portion {number}",
                )
                self._due.pop(0)
                with suppress(BrokerUnavailable):
                    kick_waiting(self._crew.app, self._crew.database, self._crew.task_settings)

    def _begin(self, at_s: float) -> None:
        """The next fault that is due and can be done now: one for which nobody is there keeps no other waiting."""
        for due in [each for each in self._planned if each[0] <= at_s]:
            fault = due[1](self._crew, self._draw)
            with suppress(NobodyThere, StorageError):
                incident = Incident(fault, at_s)
                fault.begin()
                self._planned.remove(due)
                self._raging.append(incident)
                self.incidents.append(incident)
                return

    def _end(self) -> bool:
        ended = [each for each in self._raging if each.fault.is_over()]
        servers = {each for each in self._raging if isinstance(each.fault, ServerAway)}
        if not servers.issubset(ended):  # nothing can go on before all of them are there
            ended = [each for each in ended if each.fault.victim is not None]
        for each in ended:
            each.end()
            self._raging.remove(each)
        return bool(ended)

    def _look(self, tell: Callable[[Incident], None]) -> bool:
        """Whether every fault is settled and every job has ended."""
        with self._crew.database.reading() as session:
            for incident in self.incidents:
                if not incident.is_settled:
                    incident.look(session)
                    if incident.is_settled:
                        tell(incident)
            return self._have_jobs_ended(session) and all(each.is_settled for each in self.incidents)

    def _have_jobs_ended(self, session: Session) -> bool:
        ended = session.scalars(select(JobRow.finished_at)).all()
        return len(ended) == self._num_jobs and None not in ended


def run_seed(
    seed: int, crew: Crew, work: Work, planned: Plan, *, seconds: float, tell: Callable[[Incident], None]
) -> Outcome:
    with crew.opened():
        deadline = time.monotonic() + READY_S
        while not crew.tend():
            if time.monotonic() > deadline:
                raise TimeoutError(f"The workers are not ready after {READY_S:.0f} s; look at {crew.folder}/logs.")
            time.sleep(LOOK_S)
        began = time.monotonic()
        storm = Storm(crew, work, planned, random.Random(seed), seconds)
        storm.run(tell)
        wall_s = time.monotonic() - began
        left = leases_left(crew.database, patience_s=2 * crew.lease_s)
        crew.dismiss_all()
        findings = find(crew, work.num_rows, work.undisturbed, left)
    return Outcome(seed, storm.incidents, findings, wall_s, storm.tail_s, crew.ended_alone)
