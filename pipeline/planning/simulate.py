"""The queues of a night event by event, with SimPy: workers of two pools, documents as messages."""

from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from pipeline.planning.outcome import Outcome, outcome
from pipeline.planning.service import Cluster, decode_times, prefill_times
from pipeline.planning.workload import Workload

Process = Generator[simpy.Event, Any, None]


class Night:
    """One run. `done_at[document]` is when its last answer was there."""

    def __init__(self, cluster: Cluster, work: Workload) -> None:
        self.cluster = cluster
        self.work = work
        self.reading = prefill_times(cluster, work)
        self.answering = decode_times(cluster, work)
        self.env = simpy.Environment()
        self.unread = deque(range(work.documents))
        self.ready: deque[int] = deque()
        self.arrived = self.env.event()
        self.done_at = np.zeros(work.documents)
        self.left = work.documents
        self.decode_s = 0.0
        self.most = max(1, min(cluster.documents_per_task, cluster.max_batch // max(work.questions, 1)))

    def run(self) -> Outcome:
        shared = self.cluster.prefill_workers == 0
        for _ in range(self.cluster.prefill_workers):
            self.env.process(self._read())
        for _ in range(self.cluster.decode_workers):
            self.env.process(self._read_then_answer() if shared else self._answer())
        self.env.run()
        return outcome(self.cluster, self.work, self.done_at, float(self.reading.sum()), self.decode_s)

    def _read(self) -> Process:
        while self.unread:
            document = self.unread.popleft()
            yield self.env.timeout(self.reading[document])
            self.ready.append(document)
            self.arrived.succeed()
            self.arrived = self.env.event()

    def _answer(self) -> Process:
        while self.left:
            if not self.ready:
                yield self.arrived
                # All that becomes ready at this moment is there before the first is taken.
                yield self.env.timeout(0)
                continue
            taken = [self.ready.popleft() for _ in range(min(self.most, len(self.ready)))]
            self.left -= len(taken)
            seconds = float(self.answering.own_s[taken].sum()) + self.answering.shared_s(len(taken))
            yield self.env.timeout(seconds)
            self.decode_s += seconds
            self.done_at[taken] = self.env.now

    def _read_then_answer(self) -> Process:
        """One queue: every document's reading was sent before the first one's answering."""
        yield from self._read()
        yield from self._answer()


def simulate(cluster: Cluster, work: Workload) -> Outcome:
    return Night(cluster, work).run()
