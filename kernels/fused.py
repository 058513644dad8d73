"""Decode steps in one call of native code, where a comparison with ordinary steps has shown them to be right."""

import logging
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.kv import PrefixKV, SuffixKV
from kernels.native.backend import load_library
from kernels.native.build import BuildFailed
from kernels.native.decoder import NativeDecoder, NotLlamaLike
from kernels.rows import EVERYTHING
from kernels.steps import DecodeStep, JoinedStep, PrefillStep, run_step

CPU = torch.device("cpu")
log = logging.getLogger(__name__)

# Relative. Ordinary steps in bfloat16 round after each layer, which random tokens amplify up to 5 %; what a model has
# more to it changes far more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
LENGTHS = (70, 30, 1)  # of the documents of the comparison
COUNTS = (((3, 1, 5), (1, 4), (2,)), ((1, 2, 1), (3, 1), (1,)))  # new tokens of their slots, step by step
NARROW = 20  # every sliding window, so that it takes part


def pick_decoder(hf: PreTrainedModel) -> NativeDecoder | None:
    """None where the model is not Llama-like, not on the CPU in a dtype that native code multiplies there, or where its
    native steps differ from the ordinary ones; the log says why."""
    if hf.device.type != "cpu":
        return None
    try:
        decoder = NativeDecoder(hf, load_library())
    except (BuildFailed, OSError) as exc:  # said by `quicken_model`
        log.debug("decode steps run layer by layer: %s", exc)
        return None
    except NotLlamaLike as exc:
        log.debug("decode steps run layer by layer: %s", exc)
        return None
    try:
        error = largest_error(decoder, hf)
    except Exception as exc:  # of a model that only looks alike
        log.info("decode steps run layer by layer: native ones failed with %s: %s", type(exc).__name__, exc)
        return None
    if not error <= TOLERANCE[decoder.dtype]:
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
    text = random_ids(longest.capacity)
    read = run_step(hf, PrefillStep(longest, 0, longest.capacity), text, 3)
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
    if decoder.pairs and not windows:
        keys, values = ({n: torch.empty_like(t) for n, t in kept.items()} for kept in (longest.keys, longest.values))
        again = PrefixKV(longest.capacity, 0, keys, values)
        decoder.read(again, 0, text[:40], 1)
        errors.append(_error(decoder.read(again, 40, text[40:], 3), read))
        errors += [_error(again.keys[layer], longest.keys[layer]) for layer in longest.keys]
        errors += [_error(again.values[layer], longest.values[layer]) for layer in longest.values]
    for one, other in zip(ours, theirs, strict=True):
        errors += [_error(one.keys[layer], other.keys[layer]) for layer in other.keys]
        errors += [_error(one.values[layer], other.values[layer]) for layer in other.values]
    return float(torch.stack(errors).max())


def _error(found: Tensor, expected: Tensor) -> Tensor:
    error: Tensor = (found.float() - expected.float()).norm() / expected.float().norm()
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
