"""Decode steps in one call of native code, where a comparison with ordinary steps has shown them to be right."""

import logging
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.backend import TOLERANCE
from kernels.kv import PrefixKV, SuffixKV
from kernels.native.decoder import NativeDecoder, NotLlamaLike
from kernels.rows import EVERYTHING
from kernels.steps import DecodeStep, JoinedStep, PrefillStep, run_step

CPU = torch.device("cpu")
log = logging.getLogger(__name__)

LENGTHS = (70, 30, 1)  # of the documents of the comparison
COUNTS = (((3, 1, 5), (1, 4), (2,)), ((1, 2, 1), (3, 1), (1,)))  # new tokens of their slots, step by step
NARROW = 20  # every sliding window, so that it takes part


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
    except Exception as exc:  # of a model that only looks alike
        log.info("decode steps run layer by layer: native ones failed with %s: %s", type(exc).__name__, exc)
        return None
    if not error <= TOLERANCE[torch.float32]:
        log.info("decode steps run layer by layer: native ones are off by %.2g, so the model has more to it", error)
        return None
    return decoder


@torch.inference_mode()
def largest_error(decoder: NativeDecoder, hf: PreTrainedModel) -> float:
    """Relative, of the logits of random tokens behind random documents and of what is stored of them; NaN if one is."""
    generator = torch.Generator().manual_seed(20261130)
    vocab = hf.get_input_embeddings().weight.shape[0]

    def random_ids(count: int) -> Tensor:
        return torch.randint(0, vocab, (count,), generator=generator)

    longest = PrefixKV(max(LENGTHS))
    run_step(hf, PrefillStep(longest, 0, longest.capacity), random_ids(longest.capacity), 1)
    documents = [PrefixKV(longest.capacity, length, longest.keys, longest.values) for length in LENGTHS]
    ours, theirs = ([SuffixKV(3, 8) for _ in documents] for _ in range(2))
    stored = [(0,) * len(counts) for counts in COUNTS[0]]
    windows: dict[int, int] = {}
    errors: list[Tensor] = []
    for counts in COUNTS:
        steps = [DecodeStep(*each, CPU) for each in zip(documents, ours, counts, stored, strict=True)]
        narrow = [_NarrowStep(*each, CPU) for each in zip(documents, theirs, counts, stored, strict=True)]
        ids = random_ids(sum(map(sum, counts)))
        expected = run_step(hf, JoinedStep(narrow), ids, len(ids))
        for step in narrow:
            windows |= step.windows
        errors.append(_error(decoder.logits(steps, ids, slice(None), windows), expected))
        stored = [tuple(map(sum, zip(*both, strict=True))) for both in zip(stored, counts, strict=True)]
    for one, other in zip(ours, theirs, strict=True):
        errors += [_error(one.keys[layer], other.keys[layer]) for layer in other.keys]
        errors += [_error(one.values[layer], other.values[layer]) for layer in other.values]
    return float(torch.stack(errors).max())


def _error(found: Tensor, expected: Tensor) -> Tensor:
    error: Tensor = (found - expected).norm() / expected.norm()
    return error


class _NarrowStep(DecodeStep):
    """Narrows the windows of layers, and notes them."""

    windows: Mapping[int, int] = MappingProxyType({})

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        if window < EVERYTHING:
            window = min(window, NARROW)
            self.windows = {**self.windows, layer: window}
        return super().attend(layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks)
