"""One forward pass of a transformers model with our attention in place of its own.

A step says where new keys and values go and what each token sees. transformers calls `update` of the cache it is
given and then the attention function that is registered under our name; both find the running step here.
Tokens of all questions are packed into one row [1, tokens] with explicit positions, so nothing is padded. Where a model
has recurrent layers, which take a row for one text, each question has a row of its own instead, all of equal length.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from kernels.attention import fold, unfold, with_sinks
from kernels.backend import pick_backend
from kernels.kv import PrefixKV, SuffixKV, to_index
from kernels.latent import absorb, expand, is_latent
from kernels.recurrent import RecurrentState
from kernels.rows import EVERYTHING, DecodeRows, PrefillRows

ATTENTION_NAME = "platemaker"


class Step(Protocol):
    """`positions` [tokens] are on the CPU, `rows` cuts the tokens into rows, `recurrent` has a row for each."""

    positions: Tensor
    rows: int
    recurrent: RecurrentState

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Takes the new k and v [kv_heads, tokens, head_dim] of a layer."""

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of q [query_heads, tokens, head_dim]: [tokens, query_heads, v_dim]. `sinks` [query_heads] are
        scores of one more key whose value is zero."""


class PrefillStep:
    """Tokens [start, start + tokens) of a document, written to its KV and seeing all before them."""

    rows = 1

    def __init__(self, kv: PrefixKV, start: int, tokens: int) -> None:
        self.kv = kv
        self.start = start
        self.stop = start + tokens
        self.positions = torch.arange(start, start + tokens)
        self.recurrent = kv.recurrent
        self._seen: PrefillRows | None = None

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.kv.write(layer, self.start, k, v)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        keys, values, base = self.kv.layer(layer)
        tokens, held = self.stop - self.start, self.stop - base
        self._seen = self._seen or PrefillRows(tokens, q.device)
        backend = pick_backend(q.device, q.shape[-1], q.dtype)
        part = backend.prefill(
            self._seen, q, keys[:, :held], values[:, :held], scale=scale, window=window, softcap=softcap
        )
        if sinks is not None:
            part = with_sinks(part, sinks, tokens)
        return unfold(part.out, tokens).to(q.dtype)


class ReplayStep(PrefillStep):
    """Tokens whose KV is stored already, in layers that keep every token. They see what is stored, also of themselves,
    and change nothing."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        pass


class DecodeStep:
    """New tokens of many questions, each seeing the shared document and what came before it in its own slot.

    `counts[i]` tokens belong to slot `first_slot + i`, of which `lengths[i]` are stored already. The token at offset j
    of it stands at position prefix.length + lengths[i] + j. Over a document with recurrent states the counts are equal,
    and a slot without stored tokens begins with a copy of these states.
    """

    def __init__(
        self,
        prefix: PrefixKV,
        suffix: SuffixKV,
        counts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
        *,
        first_slot: int = 0,
    ) -> None:
        self.prefix = prefix
        self.suffix = suffix
        self.taken = slice(first_slot, first_slot + len(counts))
        self.seen = DecodeRows(counts, lengths, device)
        self.positions = self.seen.local + prefix.length
        self._slots = to_index([first_slot + slot for slot in self.seen.slots], device)
        self._targets = self.seen.local.to(device)
        self.rows = 1
        self.recurrent = suffix.recurrent
        if prefix.recurrent:
            assert min(counts) == max(counts), "a row is one question's"
            self.rows = len(counts)
            for slot, length in enumerate(lengths, first_slot):
                if length == 0:
                    suffix.begin(slot, prefix)
            self.recurrent = suffix.recurrent.rows(self.taken.start, self.taken.stop)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.suffix.write(layer, self._slots, self._targets, k, v)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        keys, values, base = self.prefix.layer(layer)
        own_keys, own_values = (part[self.taken] for part in self.suffix.layer(layer))
        held = self.prefix.length - base
        folded = fold(q, keys.shape[0])
        backend = pick_backend(q.device, q.shape[-1], q.dtype)
        shared = backend.shared(
            self.seen, folded, keys[:, :held], values[:, :held], scale=scale, window=window, softcap=softcap
        )
        return backend.own_and_merge(
            self.seen, folded, own_keys, own_values, shared, scale=scale, window=window, softcap=softcap, sinks=sinks
        )


class JoinedStep:
    """Steps of several documents side by side in one row, so that the weights are read once for all of them."""

    rows = 1

    def __init__(self, steps: Sequence[DecodeStep]) -> None:
        self.positions = torch.cat([step.positions for step in steps])
        self.recurrent = RecurrentState()
        ends = list(accumulate(len(step.positions) for step in steps))
        self._parts = [(step, slice(end - len(step.positions), end)) for step, end in zip(steps, ends, strict=True)]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        for step, tokens in self._parts:
            step.store(layer, k[:, tokens], v[:, tokens])

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        return torch.cat(
            [
                step.attend(layer, q[:, tokens], scale=scale, window=window, softcap=softcap, sinks=sinks)
                for step, tokens in self._parts
            ]
        )


_running: ContextVar[Step] = ContextVar("platemaker_step")
_layer: ContextVar[int] = ContextVar("platemaker_layer")


class _StepCache(Cache):  # type: ignore[misc] # transformers is untyped here
    """What transformers sees as its cache: hands everything to the step and keeps nothing."""

    def __init__(self, step: Step, start: int) -> None:
        super().__init__(layers=[])
        self._step = step
        self._start = start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self._step.store(layer_idx, _pack(key_states), _pack(value_states))
        _layer.set(layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._step.recurrent.get("conv", layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        return self._step.recurrent.slide(layer_idx, state_idx, conv_states, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._step.recurrent.get("ssm", layer_idx, state_idx)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        return self._step.recurrent.replace(layer_idx, state_idx, recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._start > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def _pack(states: Tensor) -> Tensor:
    """[rows, heads, tokens, dim] -> [heads, rows * tokens, dim]."""
    return states.transpose(0, 1).flatten(1, 2)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: [rows, heads, tokens, head_dim] -> [rows, tokens, heads, head_dim]."""
    rows = query.shape[0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = _pack(query)
    latent = is_latent(module)
    out = _running.get().attend(
        _layer.get(),
        absorb(module, q) if latent else q,
        scale=scale,
        window=sliding_window or EVERYTHING,
        softcap=softcap,
        sinks=s_aux,
    )
    if latent:
        out = expand(module, out)
    return out.reshape(rows, -1, *out.shape[1:]), None


AttentionInterface.register(ATTENTION_NAME, _attention)


def run_step(model: PreTrainedModel, step: Step, ids: Tensor, keep: Tensor | int) -> Tensor:
    """Runs ids [tokens] through the model; returns the logits [kept, vocab] of the tokens in `keep`, in fp32.

    `keep` is a count from the end of each row, or, where there is one row, an index tensor (the model leaves the
    others' logits out).
    """
    token = _running.set(step)
    try:
        output = model(
            input_ids=ids.view(step.rows, -1),
            position_ids=step.positions.to(ids.device).view(step.rows, -1),
            cache=_StepCache(step, int(step.positions[0])),
            use_cache=True,
            logits_to_keep=keep,
        )
    finally:
        _running.reset(token)
    logits: Tensor = output.logits.flatten(0, 1)
    return logits.float()
