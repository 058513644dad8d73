"""The queues, and what each pool listens to."""

from enum import StrEnum

PREFILL_QUEUE = "prefill.batch"
DECODE_QUEUE = "decode.batch"
ALL_QUEUES = (PREFILL_QUEUE, DECODE_QUEUE)


class Pool(StrEnum):
    """Which work a worker takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALL = "all"

    @property
    def queues(self) -> tuple[str, ...]:
        return {Pool.PREFILL: (PREFILL_QUEUE,), Pool.DECODE: (DECODE_QUEUE,), Pool.ALL: ALL_QUEUES}[self]
