"""Whether the split pays for these documents: reuse, break-even, and a plain recommendation for each group."""

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from storage.break_even import SHORT_TOKENS, SplitRates
from storage.objects import ObjectStore

PROBE_BYTES = 8 * 1024 * 1024
GROUPS = ((0, "short"), (SHORT_TOKENS, "medium"), (16_000, "long"), (64_000, "very long"))


@dataclass(frozen=True)
class Advice:
    """For documents of like length. Reuse is how many questions one reading serves, over all jobs. `break_even` is the
    number of questions from which reading once and storing beats reading for each; None: no number does."""

    group: str
    documents: int
    tokens: float
    questions_per_job: float
    jobs: float
    reuse: float
    break_even: int | None
    one_piece_s: float
    shared_s: float
    split_s: float
    recommendation: str
    reason: str

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Asked:
    """One document: how long it is, how many questions a job asks of it, and how many jobs do."""

    tokens: float
    questions: float
    jobs: float = 1.0


def probe_store(store: ObjectStore, repeats: int = 3) -> tuple[float, float]:
    """Bytes a second of a put and a get, the best of a few: other work only slows a transfer down. Leaves nothing."""
    data = os.urandom(PROBE_BYTES)
    put_s, get_s = [], []
    for _ in range(repeats):
        key = f"probes/{uuid.uuid4().hex}"
        try:
            began = time.perf_counter()
            store.put(key, data)
            put = time.perf_counter()
            store.get(key)
            get_s.append(time.perf_counter() - put)
            put_s.append(put - began)
        finally:
            store.delete(key)
    return PROBE_BYTES / min(put_s), PROBE_BYTES / min(get_s)


def advise(documents: Sequence[Asked], rates: SplitRates) -> list[Advice]:
    """One entry for each group of lengths that has documents, the shortest first."""
    limits = [*(least for least, _ in GROUPS[1:]), float("inf")]
    found = []
    for (least, name), most in zip(GROUPS, limits, strict=True):
        group = [each for each in documents if least <= each.tokens < most]
        if group:
            found.append(_group(name, group, rates))
    return found


def _group(name: str, group: Sequence[Asked], rates: SplitRates) -> Advice:
    count = len(group)
    tokens = sum(each.tokens for each in group) / count
    questions = sum(each.questions for each in group) / count
    jobs = sum(each.jobs for each in group) / count
    read, put, get = rates.read_s(tokens), rates.put_s(tokens), rates.get_s(tokens)
    one_piece, shared, split = read * questions * jobs, read * jobs, read + put + get * jobs
    if questions * jobs <= 1 or one_piece <= min(shared, split):
        way, reason = "one piece", "each document is asked once, so nothing can be shared"
    elif split < shared:
        way = "split with stored snapshots"
        reason = f"{jobs:,.1f} jobs read it once; a load of {get:,.2f} s stands for a reading of {read:,.2f} s"
    else:
        way = "prefix sharing within a task"
        reason = "one job asks it, so a snapshot is stored and loaded for nothing"
        if jobs > 1:
            reason = f"the split does not pay: a load takes {get:,.2f} s, reading again {read:,.2f} s"
    return Advice(
        group=name,
        documents=count,
        tokens=tokens,
        questions_per_job=questions,
        jobs=jobs,
        reuse=questions * jobs,
        break_even=rates.break_even(tokens),
        one_piece_s=one_piece,
        shared_s=shared,
        split_s=split,
        recommendation=way,
        reason=reason,
    )
