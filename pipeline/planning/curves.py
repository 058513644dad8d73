"""Device-seconds per answer by how many questions a document gets: in one piece, shared within a task, and split."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planning.profiles import Device
from pipeline.planning.service import Cluster, decode_times, load_times, one_piece_times, prefill_times
from pipeline.planning.workload import Workload


@dataclass(frozen=True)
class Curve:
    """Device-seconds per answer, for each entry of `questions`; `split_pays_from` is the first number of questions with
    which reading once and storing is cheaper than one piece. None: with none of them."""

    questions: tuple[int, ...]
    one_piece_s: tuple[float, ...]
    shared_s: tuple[float, ...]
    split_s: tuple[float, ...]

    @property
    def split_pays_from(self) -> int | None:
        ways = zip(self.questions, self.one_piece_s, self.split_s, strict=True)
        return next((count for count, one_piece, split in ways if split < one_piece), None)


def cost_curve(
    device: Device, *, tokens: float, question_tokens: float, output_tokens: float, bytes_per_s: float,
    questions: Sequence[int] = range(1, 101),
) -> Curve:  # fmt: skip
    """For one document of so many tokens."""
    one_piece, shared, split = [], [], []
    here = Cluster(device, device, 0, 1, store_bytes_per_s=bytes_per_s, worker_bytes_per_s=bytes_per_s)
    for count in questions:
        work = Workload(np.array([float(tokens)]), count, question_tokens, output_tokens)
        times = decode_times(here, work)
        answering = float(times.own_s[0]) + times.shared_s(1)
        split.append((float(prefill_times(here, work)[0]) + answering) / count)
        shared.append((device.prefill_s(tokens) + answering - float(load_times(here, work)[0])) / count)
        one_piece.append(float(one_piece_times(device, work)[0]) / count)
    return Curve(tuple(questions), tuple(one_piece), tuple(shared), tuple(split))
