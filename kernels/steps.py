"""One forward pass of a transformers model with our attention in place of its own.

A step says where new keys and values go and what each token sees. transformers calls `update` of the cache it is
given and then the attention function that is registered under our name; both find the running step here.
Tokens of all questions are packed into one row [1, tokens] with explicit positions, so nothing is padded. Where a model
has recurrent layers, which take a row for one text, each question has a row of its own instead, all of equal length.
"""

from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from kernels.attention import Attended, Block, attend, fold, merge, plan_blocks, unfold
from kernels.kv import PrefixKV, SuffixKV, to_index
from kernels.latent import absorb, expand, is_latent
from kernels.recurrent import RecurrentState

ATTENTION_NAME = "platemaker"
EVERYTHING = 1 << 40  # a window wider than any document


class Step(Protocol):
    """`positions` [tokens] are on the CPU, `rows` cuts the tokens into rows, `recurrent` has a row for each."""

    positions: Tensor
    rows: int
    recurrent: RecurrentState

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Takes the new k and v [kv_heads, tokens, head_dim] of a layer."""

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> tuple[Attended, int]:
        """Attention of q [query_heads, tokens, head_dim]: the folded result and the number of KV heads."""


class PrefillStep:
    """Tokens [start, start + tokens) of a document, written to its KV and seeing all before them."""

    rows = 1

    def __init__(self, kv: PrefixKV, start: int, tokens: int) -> None:
        self.kv = kv
        self.start = start
        self.positions = torch.arange(start, start + tokens)
        self.recurrent = kv.recurrent
        self._blocks: dict[tuple[int, int, int], list[Block]] = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.kv.write(layer, self.start, k, v)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> tuple[Attended, int]:
        keys, values, base = self.kv.layer(layer)
        kv_heads = keys.shape[0]
        group = q.shape[0] // kv_heads
        blocks = self._blocks.get((window, group, base))
        if blocks is None:
            rows = self.positions.repeat_interleave(group) - base
            blocks = self._blocks[window, group, base] = plan_blocks(rows - window + 1, rows + 1, device=q.device)
        return attend(fold(q, kv_heads), keys, values, blocks, scale=scale, softcap=softcap), kv_heads


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
        counts: list[int],
        lengths: list[int],
        device: torch.device,
        *,
        first_slot: int = 0,
    ) -> None:
        self.prefix = prefix
        self.suffix = suffix
        self.num_slots = len(counts)
        self.width = max(counts)
        self.num_keys = max(length + count for length, count in zip(lengths, counts, strict=True))
        self.taken = slice(first_slot, first_slot + self.num_slots)
        slots = [slot for slot, count in enumerate(counts) for _ in range(count)]
        offsets = [offset for count in counts for offset in range(count)]
        local = [lengths[slot] + offset for slot, offset in zip(slots, offsets, strict=True)]
        self.local = torch.tensor(local)
        self.positions = self.local + prefix.length
        self.slots = to_index(slots, device)
        self.offsets = to_index(offsets, device)
        self.targets = self.local.to(device)
        stops = torch.zeros((self.num_slots, self.width), dtype=torch.int64)
        stops[torch.tensor(slots), torch.tensor(offsets)] = self.local + 1
        self._stops = stops
        self._prefix_blocks: dict[tuple[int, int, int], list[Block]] = {}
        self._suffix_blocks: dict[tuple[int, int, int], list[Block]] = {}
        self.rows = 1
        self.recurrent = suffix.recurrent
        if prefix.recurrent:
            assert min(counts) == self.width, "a row is one question's"
            self.rows = self.num_slots
            for slot, length in enumerate(lengths, first_slot):
                if length == 0:
                    suffix.begin(slot, prefix)
            self.recurrent = suffix.recurrent.rows(self.taken.start, self.taken.stop)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.suffix.write(layer, self.slots + self.taken.start, self.targets, k, v)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> tuple[Attended, int]:
        keys, values, base = self.prefix.layer(layer)
        kv_heads = keys.shape[0]
        group = q.shape[0] // kv_heads
        folded = fold(q, kv_heads)
        blocks = self._prefix_blocks.get((window, group, base))
        if blocks is None:
            first = (self.positions - window + 1).repeat_interleave(group) - base
            blocks = plan_blocks(first, torch.full_like(first, self.prefix.length - base), device=q.device)
            self._prefix_blocks[window, group, base] = blocks
        shared = attend(folded, keys, values, blocks, scale=scale, softcap=softcap)
        return merge(shared, self._own(layer, folded, group, scale=scale, window=window, softcap=softcap)), kv_heads

    def _own(
        self, layer: int, folded: Tensor, group: int, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        """Attention of each token over its own slot; the rows of all slots are padded to one width for it."""
        kv_heads, _, head_dim = folded.shape
        packed = folded.view(kv_heads, -1, group, head_dim).transpose(0, 1)  # [tokens, kv_heads, group, head_dim]
        padded = folded.new_zeros((self.num_slots, self.width, kv_heads, group, head_dim))
        padded[self.slots, self.offsets] = packed
        rows = padded.transpose(1, 2).reshape(self.num_slots * kv_heads, self.width * group, head_dim)
        keys, values = (part[self.taken, :, : self.num_keys].flatten(0, 1) for part in self.suffix.layer(layer))
        blocks = self._suffix_blocks.get((window, group, kv_heads))
        if blocks is None:
            stops = self._stops.repeat_interleave(kv_heads, 0).repeat_interleave(group, 1)
            blocks = plan_blocks(stops - window, stops, device=folded.device)
            self._suffix_blocks[window, group, kv_heads] = blocks
        part = attend(rows, keys, values, blocks, scale=scale, softcap=softcap)
        out = part.out.view(self.num_slots, kv_heads, self.width, group, -1).transpose(1, 2)[self.slots, self.offsets]
        lse = part.lse.view(self.num_slots, kv_heads, self.width, group).transpose(1, 2)[self.slots, self.offsets]
        return Attended(out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2))


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
    part, kv_heads = _running.get().attend(
        _layer.get(),
        absorb(module, q) if latent else q,
        scale=scale,
        window=sliding_window or EVERYTHING,
        softcap=softcap,
    )
    if s_aux is not None:  # attention sinks: one more key per head, whose value is zero
        sinks = s_aux.to(part.lse.dtype).view(kv_heads, 1, -1).expand(-1, q.shape[1], -1).reshape(kv_heads, -1)
        part = merge(part, Attended(torch.zeros_like(part.out), sinks))
    out = unfold(part.out, q.shape[1]).to(query.dtype)
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
