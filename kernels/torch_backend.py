"""Attention of prefill and decode in plain torch: runs everywhere, and is what faster backends are checked against."""

import torch
from torch import Tensor

from kernels.attention import Attended, Block, attend, fold, merge, plan_blocks, unfold, with_sinks
from kernels.flash import flash_attend
from kernels.kv import to_index
from kernels.rows import DecodeRows, PrefillRows


class TorchBackend:
    name = "torch"

    def prefill(
        self, rows: PrefillRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        kv_heads, keys = k.shape[:2]
        group = q.shape[0] // kv_heads

        def plain() -> Attended:
            stop = rows.stop(keys, group)
            blocks = rows.remember(
                ("blocks", keys, window, group), lambda: plan_blocks(stop - window, stop, device=q.device)
            )
            return attend(fold(q, kv_heads), k, v, blocks, scale=scale, softcap=softcap)

        return flash_attend(q, k, v, scale=scale, window=window, softcap=softcap, otherwise=plain)

    def shared(
        self, rows: DecodeRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        keys = k.shape[1]
        group = q.shape[1] // len(rows.slots)

        def blocks() -> list[Block]:
            first = rows.first(keys, window, group)
            return plan_blocks(first, torch.full_like(first, keys), device=q.device)

        plan = rows.remember(("shared", keys, window, group), blocks)
        part = attend(q, k, v, plan, scale=scale, softcap=softcap)
        return Attended(part.out[None], part.lse[None])

    def own_and_merge(
        self,
        rows: DecodeRows,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: Attended,
        *,
        scale: float,
        window: int,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tokens = len(rows.slots)
        part = merge(Attended(shared.out[0], shared.lse[0]), self._own(rows, q, k, v, scale, window, softcap))
        if sinks is not None:
            part = with_sinks(part, sinks, tokens)
        return unfold(part.out, tokens).to(q.dtype)

    def _own(
        self, rows: DecodeRows, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float | None
    ) -> Attended:
        """Attention of each token over its own slot; the rows of all slots are padded to one width for it."""
        kv_heads, _, head_dim = q.shape
        group = q.shape[1] // len(rows.slots)
        num_slots, width = len(rows.counts), max(rows.counts)
        num_keys = int(rows.local.max()) + 1
        slots, offsets = rows.remember(
            ("index",), lambda: (to_index(rows.slots, q.device), to_index(rows.offsets, q.device))
        )

        def blocks() -> list[Block]:
            stops = torch.zeros((num_slots, width), dtype=torch.int64)
            stops[torch.tensor(rows.slots), torch.tensor(rows.offsets)] = rows.local + 1
            stops = stops.repeat_interleave(kv_heads, 0).repeat_interleave(group, 1)
            return plan_blocks(stops - window, stops, device=q.device)

        packed = q.view(kv_heads, -1, group, head_dim).transpose(0, 1)  # [tokens, kv_heads, group, head_dim]
        padded = q.new_zeros((num_slots, width, kv_heads, group, head_dim))
        padded[slots, offsets] = packed
        padded = padded.transpose(1, 2).reshape(num_slots * kv_heads, width * group, head_dim)
        keys, values = (part[:num_slots, :, :num_keys].flatten(0, 1) for part in (k, v))
        plan = rows.remember(("own", window, group, kv_heads), blocks)
        part = attend(padded, keys, values, plan, scale=scale, softcap=softcap)
        out = part.out.view(num_slots, kv_heads, width, group, -1).transpose(1, 2)[slots, offsets]
        lse = part.lse.view(num_slots, kv_heads, width, group).transpose(1, 2)[slots, offsets]
        return Attended(out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2))
