"""The ways from a document to its answers, and why one was gone. docs/degradation.md says what each means."""

from enum import StrEnum
from typing import NamedTuple


class Mode(StrEnum):
    """What an operator or a job wants."""

    AUTO = "auto"
    SPLIT = "split"
    MONOLITHIC = "monolithic"


class Way(StrEnum):
    """`split`: one pool makes a snapshot, another answers from it. `one_piece`: who answers has read the document, by
    choice; `fallback`: the same, because the split could not be had."""

    SPLIT = "split"
    ONE_PIECE = "one_piece"
    FALLBACK = "fallback"


class Why(StrEnum):
    MODE = "mode"
    READY = "ready"
    PAYS = "pays"
    UNMEASURED = "unmeasured"
    CANARY = "canary"
    PROBE = "probe"
    SHORT = "short"
    NO_PREFILL_POOL = "no_prefill_pool"
    PREFILL_OVERLOADED = "prefill_overloaded"
    PREFILL_BREAKER = "prefill_breaker"
    STORE_BREAKER = "store_breaker"


class Choice(NamedTuple):
    way: Way
    why: Why

    def __str__(self) -> str:
        return f"{self.way.value} ({self.why.value})"


class DocumentKey(NamedTuple):
    tenant: str
    document_id: str


AS_MODE_SAYS = Choice(Way.SPLIT, Why.MODE)
