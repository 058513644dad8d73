"""One model on several cards: tensor parallelism by transformers' own plan, one process for each card.

    task ── ParallelModel ─┬─ Rank 0, in this process     orders: JSON over pipes
                           ├─ Rank 1, a process           numbers: torch.distributed (nccl, mccl; gloo on CPUs)
                           └─ Rank 2, a process

Every rank loads its part of the weights and keeps its heads of the KV on its card. What rank 0 is asked to do it orders
the others to do too, and all of them run the same step. Beside its own part, rank 0 keeps the whole KV of a document
(`WholeKV`) in the memory of the host: there chunks are encoded from and loaded into as with one card, so that nothing
that is stored depends on the number of ranks. A rank that dies takes the group with it: `RankLost`.
"""

import itertools
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch.distributed as dist
from torch import Tensor

from kernels.errors import ModelUnsupported, RankLost
from kernels.kv import SuffixKV
from kernels.layout import KVLayout
from kernels.model import Asked, LanguageModel
from kernels.rank import Rank, WholeKV
from kernels.steps import PrefillStep, ReplayStep, Step

STOP_S = 10.0


class SharedSuffix(SuffixKV):
    """The handle of what each rank keeps of the questions: every change is made by all of them."""

    def __init__(self, model: "ParallelModel", key: int, slots: int, capacity: int) -> None:
        super().__init__(slots, capacity, model.layout)
        self.key = key
        self._order = model.order

    def move(self, source: int, target: int, length: int) -> None:
        self._order("move", suffix=self.key, source=source, target=target, length=length)

    def clear(self, slot: int) -> None:
        self._order("clear", suffix=self.key, slot=slot)

    def grow(self, slots: int, capacity: int) -> None:
        if slots > self.slots or capacity > self.capacity:
            super().grow(slots, capacity)
            self._order("grow", suffix=self.key, slots=slots, capacity=capacity)


@dataclass
class ParallelModel(LanguageModel):
    """What rank 0's tasks work with, as with a model on one card. `device` is where its KV is: the host."""

    rank: Rank = field(kw_only=True)
    pipes: list[Connection] = field(kw_only=True)
    processes: list[SpawnProcess] = field(kw_only=True)
    _keys: Iterator[int] = field(default_factory=itertools.count, kw_only=True)
    _dropped: deque[int] = field(default_factory=deque, kw_only=True)
    _wholes: "weakref.WeakValueDictionary[int, WholeKV]" = field(
        default_factory=weakref.WeakValueDictionary, kw_only=True
    )
    _lock: threading.RLock = field(default_factory=threading.RLock, kw_only=True)

    def __post_init__(self) -> None:
        self.rank.whole = self._wholes.__getitem__

    @cached_property
    def layout(self) -> KVLayout:
        """With the heads of all ranks."""
        return whole_layout(self.rank.model, self.rank.count)

    @property
    def parts(self) -> tuple[LanguageModel, ...]:
        """The whole KV in the host's memory, and rank 0's part on its card; the others' are as large."""
        return (self, self.rank.model)

    def order(self, what: str, **how: Any) -> Any:
        """Has all ranks do it; returns rank 0's result.

        Raises:
            RankLost: one of them is gone; the group is of no use any more.
        """
        with self._lock:
            if self._dropped:
                keys = [self._dropped.popleft() for _ in range(len(self._dropped))]
                self._send({"do": "drop", "keys": keys})
                self.rank.drop(keys)
            self._send({"do": what, **how})
            try:
                return getattr(self.rank, what)(**how)
            except RuntimeError as exc:
                if all(process.is_alive() for process in self.processes):
                    raise
                raise RankLost(self.rank.count) from exc

    def new_kv(self, capacity: int, make_room: Callable[[int], None] = lambda _size_bytes: None) -> WholeKV:
        make_room(self.prefix_bytes(capacity))
        kv = WholeKV.empty(capacity, self.kv_shapes, dtype=self.layout.dtype, device=self.device, layout=self.layout)
        assert isinstance(kv, WholeKV)
        kv.key = self._new_key(kv)
        self._wholes[kv.key] = kv
        self.order("new_prefix", prefix=kv.key, capacity=capacity)
        return kv

    def new_suffix(self, slots: int, capacity: int) -> SharedSuffix:
        suffix = SharedSuffix(self, next(self._keys), slots, capacity)
        weakref.finalize(suffix, self._dropped.append, suffix.key)
        self.order("new_suffix", suffix=suffix.key, slots=slots, capacity=capacity)
        return suffix

    def forward(self, step: Step, ids: list[int], keep: Tensor | int) -> Tensor:
        assert isinstance(step, PrefillStep) and isinstance(step.kv, WholeKV) and isinstance(keep, int)
        kv = step.kv
        if isinstance(step, ReplayStep):
            self._spread(kv, step.stop)
            replayed: Tensor = self.order("replay", prefix=kv.key, start=step.start, ids=ids, keep=keep)
            return replayed
        self._spread(kv, step.start)
        logits: Tensor = self.order("prefill", prefix=kv.key, start=step.start, ids=ids, keep=keep)
        self.order("collect", prefix=kv.key, start=step.start, stop=step.stop)
        kv.spread = step.stop
        return logits

    def ask_all(self, documents: Iterable[Asked], *, every: bool = False) -> Tensor:
        orders = []
        for each in documents:
            self.check_prefix(each.prefix)
            assert isinstance(each.prefix, WholeKV) and isinstance(each.suffix, SharedSuffix)
            self._spread(each.prefix, each.prefix.length)
            orders.append(
                {
                    "prefix": each.prefix.key,
                    "length": each.prefix.length,
                    "suffix": each.suffix.key,
                    "pending": list(each.pending),
                    "lengths": list(each.lengths),
                }
            )
        logits: Tensor = self.order("ask_all", documents=orders, every=every)
        return logits

    def close(self) -> None:
        """Ends the other ranks and the group."""
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.close()  # the end of orders
        for process in self.processes:
            process.join(STOP_S)
            process.kill()
            process.join()
        dist.destroy_process_group()

    def _send(self, order: Mapping[str, Any]) -> None:
        data = json.dumps(order).encode()
        try:
            for pipe in self.pipes:
                pipe.send_bytes(data)
        except OSError as exc:
            raise RankLost(self.rank.count) from exc

    def _spread(self, kv: WholeKV, stop: int) -> None:
        """Before the ranks read the first `stop` tokens, they get what was loaded of them."""
        if kv.windows and kv.windows is not kv.spread_windows:
            self.order("spread_state", prefix=kv.key, length=kv.length)
            kv.spread_windows = kv.windows
        if kv.spread >= stop:
            return
        for layer in kv.token_layers:
            kv.layer(layer)  # waits until it is loaded
            self.order("spread", prefix=kv.key, layer=layer, start=kv.spread, stop=stop)
        kv.spread = stop

    def _new_key(self, kv: WholeKV) -> int:
        key = next(self._keys)
        weakref.finalize(kv, self._dropped.append, key)
        return key


def kv_heads(config: Mapping[str, Any]) -> int:
    named = (config.get(name) for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads"))
    return next((int(heads) for heads in named if heads), 0)


def whole_layout(model: LanguageModel, count: int) -> KVLayout:
    """What a rank keeps, with the heads of all.

    Raises:
        ModelUnsupported: it keeps something else than whole heads.
    """
    own, name = model.layout, type(model.hf).__name__
    if own.recurrent or own.latent:
        kind = "recurrent states" if own.recurrent else "compressed keys (MLA)"
        raise ModelUnsupported(name, f"its {kind} cannot be put together from several ranks")
    total = kv_heads(model.hf.config.get_text_config().to_dict())
    for shape in own.tokens.values():
        if shape.kv_heads not in (total, total // count):
            raise ModelUnsupported(name, f"a rank has {shape.kv_heads} of its {total} KV heads, not 1/{count} of them")
    return replace(own, tokens={layer: shape._replace(kv_heads=total) for layer, shape in own.tokens.items()})
