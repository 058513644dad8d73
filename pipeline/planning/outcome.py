"""What a planned night comes to."""

from dataclasses import dataclass

import numpy as np

from pipeline.planning.service import Cluster
from pipeline.planning.workload import Numbers, Workload


@dataclass(frozen=True)
class Outcome:
    """`p50_s` and `p95_s`: when half, and 95 %, of the documents had all their answers. Busy shares are of the time
    until the last. `cost` is of all workers until then, in the devices' prices, or device-hours where one has none."""

    finish_s: float
    p50_s: float
    p95_s: float
    prefill_busy: float
    decode_busy: float
    device_hours: float
    cost: float
    cost_is_device_hours: bool
    answers: int

    @property
    def cost_per_1000_answers(self) -> float:
        return 1000 * self.cost / self.answers if self.answers else 0.0


def outcome(cluster: Cluster, work: Workload, done_at: Numbers, prefill_s: float, decode_s: float) -> Outcome:
    """From the moment each document was done, and the seconds that both pools worked."""
    finish = float(done_at.max(initial=0.0))
    hours = finish / 3600
    prices = (cluster.prefill.price_per_hour, cluster.decode.price_per_hour)
    unpriced = prices[1] is None or (prices[0] is None and cluster.prefill_workers > 0)
    device_hours = cluster.workers * hours
    cost = (
        device_hours
        if unpriced
        else hours * (cluster.prefill_workers * (prices[0] or 0.0) + cluster.decode_workers * (prices[1] or 0.0))
    )
    shared = cluster.prefill_workers == 0
    decode_busy = (decode_s + (prefill_s if shared else 0.0)) / (cluster.decode_workers * finish) if finish else 0.0
    prefill_busy = prefill_s / (cluster.prefill_workers * finish) if finish and not shared else decode_busy
    return Outcome(
        finish_s=finish,
        p50_s=float(np.quantile(done_at, 0.5)) if len(done_at) else 0.0,
        p95_s=float(np.quantile(done_at, 0.95)) if len(done_at) else 0.0,
        prefill_busy=prefill_busy,
        decode_busy=decode_busy,
        device_hours=device_hours,
        cost=cost,
        cost_is_device_hours=unpriced,
        answers=work.answers,
    )
