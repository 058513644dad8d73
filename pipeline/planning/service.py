"""How long a worker takes for a document: reading it, answering from its snapshot, or all in one piece."""

import math
from dataclasses import dataclass

import numpy as np

from pipeline.planning.profiles import Device
from pipeline.planning.workload import Numbers, Workload


@dataclass(frozen=True)
class Cluster:
    """`prefill_workers` 0: the decode workers read, too, one queue behind the other, as `worker all` does.

    Each worker moves data at `worker_bytes_per_s` at most, and all together at `store_bytes_per_s`.
    """

    prefill: Device
    decode: Device
    prefill_workers: int
    decode_workers: int
    store_bytes_per_s: float = 1e9
    worker_bytes_per_s: float = 1e9
    max_batch: int = 32
    documents_per_task: int = 16

    @property
    def workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def bytes_per_s(self) -> float:
        """Of one worker, as if all moved data at once: an upper bound of the time."""
        return min(self.worker_bytes_per_s, self.store_bytes_per_s / self.workers)


@dataclass(frozen=True)
class DecodeTimes:
    """A decode task with several documents takes the sum of their `own_s`, and `shared_s` once."""

    own_s: Numbers
    rows: int
    step_s: float
    output_tokens: float
    max_batch: int

    def shared_s(self, documents: int) -> float:
        """Seconds that the steps take whatever stands in them: the weights are read once for all rows of a step."""
        return math.ceil(documents * self.rows / self.max_batch) * self.output_tokens * self.step_s


def prefill_times(cluster: Cluster, work: Workload) -> Numbers:
    """Seconds per document. Chunks are stored while the next is computed, so the longer of both counts."""
    device = cluster.prefill
    read = device.prefill_s_per_token * work.tokens + device.prefill_s_per_token2 * work.tokens**2
    stored = device.kv_bytes_per_token * work.tokens / cluster.bytes_per_s
    times: Numbers = np.maximum(read, stored) + device.document_overhead_s
    return times


def load_times(cluster: Cluster, work: Workload) -> Numbers:
    """Seconds per document: as measured, or as long as its bytes take, if that is longer."""
    device = cluster.decode
    times: Numbers = work.tokens * max(device.load_s_per_token, device.kv_bytes_per_token / cluster.bytes_per_s)
    return times


def decode_times(cluster: Cluster, work: Workload) -> DecodeTimes:
    """Loading, the questions' own tokens, and each step's rows and shared KV."""
    device = cluster.decode
    load = load_times(cluster, work)
    asked = work.questions * work.question_tokens
    question = asked * (device.prefill_s_per_token + 2 * device.prefill_s_per_token2 * work.tokens)
    steps = np.ceil(work.questions / cluster.max_batch) * work.output_tokens
    rows = work.questions * work.output_tokens
    per_step = device.step_s_per_token * work.tokens * steps
    per_row = rows * (device.step_s_per_row + device.step_s_per_row_token * work.tokens)
    own = load + question + per_step + per_row + work.questions * device.answer_overhead_s + device.document_overhead_s
    return DecodeTimes(own, work.questions, device.step_s, work.output_tokens, cluster.max_batch)


def one_piece_times(device: Device, work: Workload) -> Numbers:
    """Seconds per document where every question reads it again and is answered alone."""
    prompt = work.tokens + work.question_tokens
    read = device.prefill_s_per_token * prompt + device.prefill_s_per_token2 * prompt**2
    step = device.step_s + device.step_s_per_row + (device.step_s_per_token + device.step_s_per_row_token) * work.tokens
    times: Numbers = work.questions * (read + work.output_tokens * step + device.answer_overhead_s)
    return times
