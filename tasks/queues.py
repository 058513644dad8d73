"""The queues, and what each worker listens to: the first of its queues that is not empty."""

from dataclasses import dataclass
from enum import StrEnum

from storage.tiers import Stage, Tier


def queue_of(stage: Stage, tier: Tier) -> str:
    return f"{'prefill' if stage == Stage.READ else 'decode'}.{tier}"


# Fast before batch. An answer that is near comes first where it is urgent; else documents, so that batches are large.
ORDER = (
    (Stage.ANSWER, Tier.FAST),
    (Stage.READ, Tier.FAST),
    (Stage.READ, Tier.BATCH),
    (Stage.ANSWER, Tier.BATCH),
)
ALL_QUEUES = tuple(queue_of(stage, tier) for stage, tier in ORDER)
PREFILL_QUEUES = frozenset(queue_of(Stage.READ, tier) for tier in Tier)
DECODE_QUEUES = frozenset(queue_of(Stage.ANSWER, tier) for tier in Tier)


class Pool(StrEnum):
    """Which work a worker takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALL = "all"

    @property
    def stages(self) -> tuple[Stage, ...]:
        decode = (Stage.ANSWER, Stage.WHOLE)
        return {Pool.PREFILL: (Stage.READ,), Pool.DECODE: decode, Pool.ALL: (Stage.READ, *decode)}[self]


class Tiers(StrEnum):
    """Of which tiers."""

    FAST = "fast"
    BATCH = "batch"
    ALL = "all"

    @property
    def taken(self) -> tuple[Tier, ...]:
        return tuple(Tier) if self == Tiers.ALL else (Tier(self.value),)


@dataclass(frozen=True)
class Duty:
    """What a worker was started for."""

    pool: Pool = Pool.ALL
    tiers: Tiers = Tiers.ALL

    @property
    def queues(self) -> tuple[str, ...]:
        taken = ((stage, tier) for stage, tier in ORDER if stage in self.pool.stages and tier in self.tiers.taken)
        return tuple(queue_of(stage, tier) for stage, tier in taken)


EVERYTHING = Duty()
