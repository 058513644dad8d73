"""Attention of prefill and decode by our Triton kernels, and by the device's own flash attention where that can."""

import torch
from torch import Tensor

from kernels.attention import Attended, fold
from kernels.flash import flash_attend
from kernels.rows import DecodeRows, PrefillRows
from kernels.triton.prefix import prefix_parts, shared_prefix
from kernels.triton.suffix import plan_tiles, suffix_merge


class TritonBackend:
    name = "triton"

    def prefill(
        self, rows: PrefillRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        kv_heads, keys = k.shape[:2]
        group = q.shape[0] // kv_heads

        def ours() -> Attended:
            stop = rows.stop(keys, group)
            low = rows.remember(("first", keys, window, group), lambda: _int32(stop - window, rows.device))
            high = rows.remember(("stop", keys, group), lambda: _int32(stop, rows.device))
            begin = max(0, keys - rows.tokens + 1 - window)
            first = low if window < keys else None
            return shared_prefix(
                fold(q, kv_heads), k, v, scale=scale, softcap=softcap, first=first, stop=high, begin=begin
            )

        return flash_attend(q, k, v, scale=scale, window=window, softcap=softcap, otherwise=ours)

    def shared(
        self, rows: DecodeRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        keys = k.shape[1]
        group = q.shape[1] // len(rows.slots)
        begin = keys + int(rows.local.min()) - window + 1
        if keys + int(rows.local.max()) < window:  # every row sees all of it
            return prefix_parts(q, k, v, scale=scale, softcap=softcap)
        first = rows.remember(
            ("first", keys, window, group), lambda: _int32(rows.first(keys, window, group), rows.device)
        )
        begin = min(max(begin, 0), keys)
        return prefix_parts(q, k, v, scale=scale, softcap=softcap, first=first, begin=begin)

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
        group = q.shape[1] // len(rows.slots)
        tiles = rows.remember(("tiles", group), lambda: plan_tiles(rows.counts, rows.lengths, group, rows.device))
        return suffix_merge(
            q, k, v, tiles, shared, group=group, scale=scale, window=window, softcap=softcap, sinks=sinks
        )


def _int32(positions: Tensor, device: torch.device) -> Tensor:
    return positions.clamp(-(2**31), 2**31 - 1).to(torch.int32).to(device, non_blocking=True)
