"""Reading a document once: chunk by chunk into preallocated KV."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import NonFiniteLogits, ProbeMismatch
from kernels.kv import PrefixKV
from kernels.model import LanguageModel
from kernels.steps import PrefillStep, ReplayStep

PROBE_SIZE = 8
PROBE_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 1.0}  # of a logit


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


def chunk_stops(num_tokens: int, head_tokens: int, chunk_tokens: int) -> tuple[int, ...]:
    """Where the chunks of a prefix end: the head, which all documents share, then every `chunk_tokens`."""
    stops = {head_tokens, *range(chunk_tokens, num_tokens, chunk_tokens)}
    return (*sorted(stop for stop in stops if 0 < stop < num_tokens), num_tokens)


def prefill(
    model: LanguageModel,
    ids: list[int],
    *,
    stops: Sequence[int],
    kv: PrefixKV | None = None,
    on_chunk: Callable[[PrefixKV, int, int], None] = lambda _kv, _start, _stop: None,
) -> Prefilled:
    """Runs the prefix `ids`; behind the `kv.length` tokens, up to one of `stops`, that a given KV already holds.

    `on_chunk(kv, start, stop)` is called as soon as the tokens [start, stop) between two stops are ready. A short
    chunk is run together with the next one. At least the last chunk is always computed, since the probe comes from
    its last token.

    Raises:
        NonFiniteLogits: the model overflowed.
    """
    began = time.perf_counter()
    kv = kv or model.new_kv(len(ids))
    starts = [0, *stops[:-1]]
    first = max(start for start in starts if start <= kv.length)
    longest = max(stop - start for start, stop in zip(starts, stops, strict=True))
    chunks = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start >= first]
    while chunks:
        start = chunks[0][0]
        together = [chunk for chunk in chunks if chunk[1] - start <= longest]
        stop = together[-1][1]
        logits = model.forward(PrefillStep(kv, start, stop - start), ids[start:stop], 1)
        for chunk in together:
            kv.length = chunk[1]
            on_chunk(kv, *chunk)
        chunks = chunks[len(together) :]
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteLogits
    return Prefilled(kv, Probe.of(logits[-1]), len(ids) - first, time.perf_counter() - began)


def check_probe(model: LanguageModel, last_id: int, kv: PrefixKV, probe: Probe) -> None:
    """Runs the last prefix token once more over the KV and compares its best logits with those it had.

    Raises:
        ProbeMismatch: they differ by more than another device or another order of sums explains.
    """
    logits = model.forward(ReplayStep(kv, kv.length - 1, 1), [last_id], 1)[0]
    found = logits[list(probe.token_ids)]
    expected = torch.tensor(probe.logits, device=found.device)
    error = float((found - expected).abs().max())
    if not error <= PROBE_TOLERANCE[model.dtype]:
        raise ProbeMismatch(error)
