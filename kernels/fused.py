"""Decode steps in one call of native code, where a comparison with ordinary steps has shown them to be right."""

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.backend import TOLERANCE
from kernels.kv import PrefixKV, SuffixKV
from kernels.native.decoder import NativeDecoder, NotLlamaLike
from kernels.rows import EVERYTHING
from kernels.steps import DecodeStep, JoinedStep, run_step

CPU = torch.device("cpu")
log = logging.getLogger(__name__)

NARROW = 40  # every sliding window in the comparison, so that it takes part
TRIALS = (  # of each document: its length, new tokens of each slot, and those stored before
    ((300, (3, 1, 2), (0, 7, 50)),),
    ((30, (1, 4), (2, 0)), (75, (1,), (60,)), (1, (2, 1, 1), (1, 0, 3))),
)


def pick_decoder(hf: PreTrainedModel) -> NativeDecoder | None:
    """None where the model is not Llama-like, not in float32 on the CPU, or where its native steps differ from the
    ordinary ones; the log says why."""
    try:
        decoder = NativeDecoder(hf)
    except NotLlamaLike as exc:
        log.debug("decode steps run layer by layer: %s", exc)
        return None
    try:
        error = largest_error(decoder, hf)
    except (AssertionError, TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as exc:
        log.info("decode steps run layer by layer: native ones failed with %s: %s", type(exc).__name__, exc)
        return None
    if not error <= TOLERANCE[torch.float32]:
        log.info("decode steps run layer by layer: native ones are off by %.2g, the model has something else", error)
        return None
    return decoder


def largest_error(decoder: NativeDecoder, hf: PreTrainedModel) -> float:
    """Relative, of the logits of random tokens over random documents and of what is stored of them; NaN if one is."""
    generator = torch.Generator().manual_seed(20261130)
    vocab = hf.get_input_embeddings().weight.shape[0]
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for trial in TRIALS:
        ours = [
            DecodeStep(
                _random_prefix(decoder, length, generator), _random_suffix(decoder, generator), counts, lengths, CPU
            )
            for length, counts, lengths in trial
        ]
        windows: dict[int, int] = {}
        theirs = [_NarrowStep(step, windows) for step in ours]
        ids = torch.randint(0, vocab, (sum(len(step.positions) for step in ours),), generator=generator)
        with torch.inference_mode():
            expected.append(run_step(hf, JoinedStep(theirs), ids, len(ids)))
        found.append(decoder.logits(ours, ids, slice(None), windows))
        for one, other in zip(ours, theirs, strict=True):
            for layer, _ in decoder.layers:
                found += [one.suffix.keys[layer], one.suffix.values[layer]]
                expected += [other.suffix.keys[layer], other.suffix.values[layer]]
    errors = [(one - other).norm() / other.norm() for one, other in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())


class _NarrowStep(DecodeStep):
    """The same over its own copy of the suffix; notes the windows of layers, and narrows them."""

    def __init__(self, step: DecodeStep, windows: dict[int, int]) -> None:
        super().__init__(step.prefix, _copy(step.suffix), step.seen.counts, step.seen.lengths, CPU)
        self.windows = windows

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        if window < EVERYTHING:
            self.windows[layer] = window = min(window, NARROW)
        return super().attend(layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks)


def _random_prefix(decoder: NativeDecoder, length: int, generator: torch.Generator) -> PrefixKV:
    kv = PrefixKV(length + 3, length)
    for layer, _ in decoder.layers:
        for kept in (kv.keys, kv.values):
            kept[layer] = torch.randn((decoder.kv_heads, kv.capacity, decoder.dim), generator=generator)
    return kv


def _random_suffix(decoder: NativeDecoder, generator: torch.Generator) -> SuffixKV:
    suffix = SuffixKV(4, 64)
    for layer, _ in decoder.layers:
        for kept in (suffix.keys, suffix.values):
            kept[layer] = torch.randn((4, decoder.kv_heads, suffix.capacity, decoder.dim), generator=generator)
    return suffix


def _copy(suffix: SuffixKV) -> SuffixKV:
    keys, values = ({layer: kept.clone() for layer, kept in part.items()} for part in (suffix.keys, suffix.values))
    return SuffixKV(suffix.slots, suffix.capacity, keys=keys, values=values)
