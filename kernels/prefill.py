"""Reading a document once: chunk by chunk into preallocated KV."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.errors import ContextExceeded, NonFiniteLogits, ProbeMismatch
from kernels.kv import PrefixKV
from kernels.model import LanguageModel
from kernels.steps import PrefillStep

PROBE_SIZE = 8
# Largest difference of a logit between where a snapshot was made and where it is used. Logits of real models are in
# the tens, where bfloat16 has steps of 0.125.
PROBE_TOLERANCE = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 1.0}


@dataclass(frozen=True)
class Probe:
    """The best next tokens, with their logits, after one more token that is asked behind the prefix: a snapshot's
    semantic check. It is taken as an answer is, from what is stored and without changing it."""

    token_ids: tuple[int, ...]
    logits: tuple[float, ...]

    @classmethod
    def of(cls, logits: Tensor) -> "Probe":
        """From the logits [vocab] of that token."""
        best = logits.topk(min(PROBE_SIZE, len(logits)))
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
    """Runs the prefix `ids` in chunks that end at `stops` (increasing, the last is len(ids)).

    A given KV holds the first `kv.length` tokens already, up to one of the stops. At least the last chunk is always
    computed; a KV with windows or recurrent states cannot go back and must end before it.

    `on_chunk(kv, start, stop)` is called as soon as the tokens [start, stop) are ready; `kv.state()` is then that
    behind `stop` tokens. Where there is no state, a short chunk is run together with the next one.

    Raises:
        NonFiniteLogits: the model overflowed.
        ContextExceeded: no token fits behind the prefix.
        ChunkMismatch: the given KV was made without this model's layout, or lacks its state.
    """
    began = time.perf_counter()
    if len(ids) >= model.context_len:
        raise ContextExceeded(len(ids) + 1, model.context_len)
    kv = kv or model.new_kv(len(ids))
    first = _first_token(kv, stops, len(ids))
    model.check_prefix(kv)
    chunks = [chunk for chunk in pairwise((0, *stops)) if chunk[0] >= first]
    for together in _runs(chunks, longest=max(stop - start for start, stop in pairwise((0, *stops))), kv=kv):
        start, stop = together[0][0], together[-1][1]
        logits = model.forward(PrefillStep(kv, start, stop - start), ids[start:stop], 1)
        for chunk in together:
            kv.length = chunk[1]
            on_chunk(kv, *chunk)
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteLogits
    return Prefilled(kv, take_probe(model, ids[-1], kv), len(ids) - first, time.perf_counter() - began)


def _runs(chunks: list[tuple[int, int]], *, longest: int, kv: PrefixKV) -> Iterator[list[tuple[int, int]]]:
    """Chunks that are run together; each alone where the state at its end is asked for."""
    while chunks:
        fitting = [chunk for chunk in chunks if chunk[1] - chunks[0][0] <= longest]
        together = fitting[:1] if kv.layout.has_state else fitting
        yield together
        chunks = chunks[len(together) :]


def _first_token(kv: PrefixKV, stops: Sequence[int], num_tokens: int) -> int:
    if not stops or list(stops) != sorted({*stops}) or stops[0] <= 0 or stops[-1] != num_tokens:
        raise ValueError(f"stops must increase from above 0 to {num_tokens}")
    if kv.length not in (0, *stops):
        raise ValueError(f"the KV ends at token {kv.length}, which is not one of the stops")
    first = min(kv.length, stops[-2] if len(stops) > 1 else 0)
    if first < kv.length and (kv.windows or kv.recurrent):
        raise ValueError("the last chunk is always computed; load the state at the stop before it")
    return first


def take_probe(model: LanguageModel, last_id: int, kv: PrefixKV) -> Probe:
    """Asks the prefix's last token again, behind it. Changes nothing.

    Raises:
        NonFiniteLogits: the logits are NaN or infinite.
    """
    logits = probe_logits(model, last_id, kv)
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteLogits
    return Probe.of(logits)


def check_probe(model: LanguageModel, last_id: int, kv: PrefixKV, probe: Probe) -> None:
    """Proves that a loaded KV does here what it did where it was made.

    Raises:
        ProbeMismatch: the logits differ by more than PROBE_TOLERANCE, or the probe is none.
    """
    tolerance = PROBE_TOLERANCE[model.dtype]
    logits = probe_logits(model, last_id, kv)
    tokens = list(probe.token_ids)
    if not tokens or len(tokens) != len(probe.logits) or not all(0 <= token < len(logits) for token in tokens):
        raise ProbeMismatch(float("nan"), tolerance)
    expected = torch.tensor([*probe.logits, probe.logits[0]])
    found = torch.cat([logits[tokens], logits.max()[None]]).cpu()
    error = float((found - expected).abs().max())
    if not error <= tolerance:
        raise ProbeMismatch(error, tolerance)


def probe_logits(model: LanguageModel, last_id: int, kv: PrefixKV) -> Tensor:
    """Logits [vocab] after the prefix and its last token once more."""
    return model.ask(kv, model.new_suffix(1, 1), [[last_id]], [0])[0]
