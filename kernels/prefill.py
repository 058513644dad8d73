"""Reading a document once: chunk by chunk into preallocated KV."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import NonFiniteLogits
from kernels.kv import PrefixKV
from kernels.model import LanguageModel
from kernels.steps import PrefillStep

PROBE_SIZE = 8


@dataclass(frozen=True)
class Probe:
    """The best next tokens after the last prefix token, with their logits: a snapshot's semantic check."""

    token_ids: tuple[int, ...]
    logits: tuple[float, ...]

    @classmethod
    def of(cls, logits: Tensor) -> "Probe":
        """From the logits [vocab] of the last prefix token."""
        best = logits.topk(PROBE_SIZE)
        return cls(tuple(best.indices.tolist()), tuple(best.values.tolist()))


@dataclass(frozen=True)
class Prefilled:
    kv: PrefixKV
    probe: Probe
    computed_tokens: int
    prefill_s: float


def prefill(
    model: LanguageModel,
    ids: list[int],
    *,
    chunk_tokens: int,
    kv: PrefixKV | None = None,
    on_chunk: Callable[[PrefixKV, int, int], None] = lambda _kv, _start, _stop: None,
) -> Prefilled:
    """Runs the prefix `ids`; behind the `kv.length` tokens that a given KV already holds.

    `on_chunk(kv, start, stop)` is called as soon as the tokens [start, stop) are ready; chunks start at multiples
    of `chunk_tokens`. At least the last chunk is always computed, since the probe comes from its last token.

    Raises:
        NonFiniteLogits: the model overflowed.
    """
    began = time.perf_counter()
    kv = kv or PrefixKV(len(ids))
    first = min(kv.length, (len(ids) - 1) // chunk_tokens * chunk_tokens)
    for start in range(first, len(ids), chunk_tokens):
        stop = min(start + chunk_tokens, len(ids))
        logits = model.forward(PrefillStep(kv, start, stop - start), ids[start:stop], 1)
        kv.length = stop
        on_chunk(kv, start, stop)
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteLogits
    return Prefilled(kv, Probe.of(logits[-1]), len(ids) - first, time.perf_counter() - began)
