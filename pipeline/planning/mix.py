"""The cheapest counts of workers that finish within the window."""

import math
from dataclasses import dataclass, replace

from pipeline.errors import PlanError
from pipeline.planning.fast import plan_fast
from pipeline.planning.outcome import Outcome
from pipeline.planning.service import Cluster, decode_times, prefill_times
from pipeline.planning.workload import Workload

MOST_WORKERS = 100_000


@dataclass(frozen=True)
class Mix:
    cluster: Cluster
    outcome: Outcome


def cheapest(cluster: Cluster, work: Workload, window_s: float) -> Mix:
    """Of a prefill and a decode pool, and of one pool that does both on the decode device: the cheaper by the hour.

    Counts begin where the work alone fills the window, and the pool that is busier grows until the night fits.

    Raises:
        PlanError: no number of workers is enough.
    """
    moved = 2 * cluster.prefill.kv_bytes_per_token * float(work.tokens.sum())  # each snapshot is put once and got once
    if moved > window_s * cluster.store_bytes_per_s:
        needed = moved / window_s / 1e9
        raise PlanError(
            f"the store is too slow for any number of workers: {moved / 1e12:,.1f} TB of snapshots in this window "
            f"need {needed:,.1f} GB/s; give more hours, a faster store, or store fewer bytes with a codec"
        )
    split = _grow(cluster, work, window_s, shared=False)
    both = replace(cluster, prefill=cluster.decode)
    shared = _grow(both, work, window_s, shared=True)
    return min(split, shared, key=lambda mix: (_per_hour(mix.cluster), mix.outcome.finish_s))


def _grow(cluster: Cluster, work: Workload, window_s: float, *, shared: bool) -> Mix:
    one = replace(cluster, prefill_workers=0 if shared else 1, decode_workers=1)
    times = decode_times(one, work)
    together = max(1, min(one.documents_per_task, one.max_batch // max(work.questions, 1)))
    reading_s = float(prefill_times(one, work).sum())
    answering_s = float(times.own_s.sum()) + work.documents / together * times.shared_s(together)
    readers = 0 if shared else max(1, math.ceil(reading_s / window_s))
    answerers = max(1, math.ceil((answering_s + (reading_s if shared else 0.0)) / window_s))
    while readers + answerers <= MOST_WORKERS:
        found = replace(cluster, prefill_workers=readers, decode_workers=answerers)
        result = plan_fast(found, work)
        if result.finish_s <= window_s:
            return Mix(found, result)
        short_by = min(2.0, result.finish_s / window_s)
        if readers and result.prefill_busy > result.decode_busy:
            readers = max(readers + 1, int(readers * (1 + (short_by - 1) / 2)))
        else:
            answerers = max(answerers + 1, int(answerers * (1 + (short_by - 1) / 2)))
        if readers + answerers > 2 * work.documents + 2:
            break
    raise PlanError("no number of workers finishes in this window; give more hours, a faster device or a faster store")


def _per_hour(cluster: Cluster) -> float:
    prices = cluster.prefill.price_per_hour, cluster.decode.price_per_hour
    if prices[1] is None or (prices[0] is None and cluster.prefill_workers):
        return float(cluster.workers)
    return cluster.prefill_workers * (prices[0] or 0.0) + cluster.decode_workers * prices[1]
