"""Attention of questions behind a document, and of its last tokens, beside one softmax in float64 on the CPU."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kernels.attention import Attended, fold, merge, unfold
from kernels.backend import AttentionBackend
from kernels.flash import plain_attend
from kernels.rows import DecodeRows, PrefillRows

SEED = 20261130
EVERYTHING = 1 << 40
KV_HEADS, GROUP = 2, 3
DOCUMENT, CHUNK = 400, 70
COUNTS, LENGTHS = (3, 1, 2), (0, 7, 40)  # new and stored tokens of three questions


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + seed))


class AttentionCase:
    """Questions behind a document, and its last tokens, of one shape."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        dim: int,
        v_dim: int,
        *,
        window: int = EVERYTHING,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        self.device, self.tokens = device, sum(COUNTS)
        self.scale, self.window, self.softcap = dim**-0.5, window, softcap
        self.how: dict[str, Any] = {"scale": self.scale, "window": window, "softcap": softcap}
        heads, room = KV_HEADS * GROUP, 48

        def place(*shape: int, seed: int) -> Tensor:
            return random_tensor(*shape, seed=seed).to(device, dtype)

        self.q, self.chunk = place(heads, self.tokens, dim, seed=1), place(heads, CHUNK, dim, seed=2)
        self.k = place(KV_HEADS, DOCUMENT + 30, dim, seed=3)[:, :DOCUMENT]
        self.v = place(KV_HEADS, DOCUMENT + 30, v_dim, seed=4)[:, :DOCUMENT]
        self.own_k, self.own_v = (
            place(len(COUNTS), KV_HEADS, room, dim, seed=5),
            place(len(COUNTS), KV_HEADS, room, v_dim, seed=6),
        )
        self.sinks = place(heads, seed=7) if sinks else None

    def shared(self, backend: AttentionBackend) -> Sequence[Tensor]:
        """What the questions see of the document: [kv_heads, rows, v_dim] and its log-sum-exp."""
        parts = self._shared(backend, self._rows())
        whole = reduce(merge, (Attended(out, lse) for out, lse in zip(parts.out, parts.lse, strict=True)))
        return [whole.out, whole.lse]

    def answer(self, backend: AttentionBackend) -> Sequence[Tensor]:
        """The whole attention of the questions: [tokens, query_heads, v_dim]."""
        rows = self._rows()
        shared, q = self._shared(backend, rows), fold(self.q, KV_HEADS)
        return [backend.own_and_merge(rows, q, self.own_k, self.own_v, shared, sinks=self.sinks, **self.how)]

    def read(self, backend: AttentionBackend) -> Sequence[Tensor]:
        """The document's last tokens: [tokens, query_heads, v_dim] and the log-sum-exp [kv_heads, rows]."""
        if backend.name == "torch":  # not the flash attention that it prefers where there is one
            part = plain_attend(self.chunk, self.k, self.v, **self.how)
        else:
            rows = PrefillRows(CHUNK, self.device)
            part = backend.prefill(rows, self.chunk, self.k, self.v, **self.how)
        return [unfold(part.out, CHUNK), part.lse]

    def exact_shared(self) -> Sequence[Tensor]:
        out, lse = self.exact(self.q, self.k, self.v, torch.ones(self.tokens, DOCUMENT, dtype=torch.bool))
        return [fold(out.transpose(0, 1), KV_HEADS), fold(lse[..., None], KV_HEADS)[..., 0]]

    def exact_answer(self) -> Sequence[Tensor]:
        rows, made = self._rows(), []
        for token, (slot, local) in enumerate(zip(rows.slots, rows.local.tolist(), strict=True)):
            k = torch.cat([self.k, self.own_k[slot, :, : local + 1]], 1)
            v = torch.cat([self.v, self.own_v[slot, :, : local + 1]], 1)
            seen = (torch.arange(k.shape[1]) > DOCUMENT + local - self.window)[None]
            made.append(self.exact(self.q[:, token : token + 1], k, v, seen)[0])
        return [torch.cat(made)]

    def exact_read(self) -> Sequence[Tensor]:
        at, keys = torch.arange(DOCUMENT - CHUNK, DOCUMENT)[:, None], torch.arange(DOCUMENT)
        out, lse = self.exact(self.chunk, self.k, self.v, (keys <= at) & (keys > at - self.window))
        return [out, fold(lse[..., None], KV_HEADS)[..., 0]]

    def _rows(self) -> DecodeRows:
        return DecodeRows([*COUNTS], [*LENGTHS], self.device)

    def _shared(self, backend: AttentionBackend, rows: DecodeRows) -> Attended:
        return backend.shared(rows, fold(self.q, KV_HEADS), self.k, self.v, **self.how)

    def exact(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """One softmax over all keys: [tokens, query_heads, v_dim] and its log-sum-exp [query_heads, tokens]."""
        k, v = (part.cpu().double().repeat_interleave(GROUP, 0) for part in (k, v))
        scores = q.cpu().double() @ k.transpose(1, 2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.cpu().double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores, v = torch.cat([scores, sinks], 2), torch.cat([v, v.new_zeros((len(v), 1, v.shape[2]))], 1)
        return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)
