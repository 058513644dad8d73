"""The queues of a night computed without a simulator: millions of answers in seconds.

Documents, not answers, are what moves. They are read in order by whichever worker is free first, then answered in the
order in which they are ready; a decode worker takes what is ready beside the first, as long as it fits the batch.
`simulate` does the same with SimPy, event by event, and a test holds both to one result.
"""

import heapq

import numpy as np

from pipeline.planning.outcome import Outcome, outcome
from pipeline.planning.service import Cluster, decode_times, prefill_times
from pipeline.planning.workload import Workload


def plan_fast(cluster: Cluster, work: Workload) -> Outcome:
    reading = prefill_times(cluster, work)
    readers = [0.0] * (cluster.prefill_workers or cluster.decode_workers)
    ready = np.empty(work.documents)
    for at, seconds in enumerate(reading.tolist()):
        ready[at] = readers[0] + seconds
        heapq.heapreplace(readers, float(ready[at]))
    answerers = [0.0] * cluster.decode_workers if cluster.prefill_workers else readers

    order = np.argsort(ready, kind="stable")
    times = decode_times(cluster, work)
    sums = np.concatenate(([0.0], np.cumsum(times.own_s[order]))).tolist()
    ready_at = ready[order].tolist()
    most = max(1, min(cluster.documents_per_task, cluster.max_batch // max(work.questions, 1)))
    done = np.empty(work.documents)
    first, decode_s = 0, 0.0
    while first < work.documents:
        start = max(answerers[0], ready_at[first])
        stop = first + 1
        while stop < work.documents and stop - first < most and ready_at[stop] <= start:
            stop += 1
        seconds = sums[stop] - sums[first] + times.shared_s(stop - first)
        done[first:stop] = start + seconds
        heapq.heapreplace(answerers, start + seconds)
        decode_s += seconds
        first = stop
    return outcome(cluster, work, done, float(reading.sum()), decode_s)
