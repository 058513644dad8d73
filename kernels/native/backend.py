"""Attention of prefill and decode on a CPU by attention.cpp: scores and sums in float32, products in float32 or, where
the CPU multiplies them in pairs, in bfloat16."""

import torch
from torch import Tensor

from kernels.attention import Attended
from kernels.native.build import build
from kernels.native.library import TYPES, Library, OwnCall, PrefixCall, pointer
from kernels.rows import DecodeRows, PrefillRows
from kernels.settings import user_cache_dir

FLOATS_PER_TASK = 24576  # of a task's sums; with the keys and values of a block they stay in a core's L2 cache
ROWS_PER_TASK = {torch.float32: (48, 384), torch.bfloat16: (96, 384)}  # values in bfloat16 are turned for each task
KEYS_PER_PART = 256  # at least
TASKS_PER_THREAD = 3  # at least, so that a core that is slowed down by others holds up nobody


class NativeBackend:
    name = "native"

    def __init__(self, library: Library | None = None) -> None:
        """Builds the library unless one is given.

        Raises:
            BuildFailed: nothing can be built here.
            OSError: what was built cannot be loaded.
        """
        self.library = library or load_library()

    def prefill(
        self, rows: PrefillRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        group = q.shape[0] // k.shape[0]
        q = q if q.stride(-1) == 1 else q.contiguous()
        strides = (q.stride(0) * group, q.stride(1), q.stride(0))
        begin = max(0, k.shape[1] - rows.tokens + 1 - window)
        call = prefix_call(
            q.dtype, strides, k, v, None, group, rows.tokens, begin, scale=scale, window=window, softcap=softcap
        )
        part = self._prefix(call, q)
        return Attended(part.out[0], part.lse[0])

    def shared(
        self, rows: DecodeRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        group = q.shape[1] // len(rows.slots)
        q, strides = _folded(q, group)
        call = shared_call(rows, q.dtype, strides, k, v, group, scale=scale, window=window, softcap=softcap)
        return self._prefix(call, q)

    def _prefix(self, call: PrefixCall, q: Tensor) -> Attended:
        rows = (call.parts, call.kv_heads, call.tokens * call.group)
        out, lse = torch.empty((*rows, call.v_dim)), torch.empty(rows)
        call.q, call.out, call.lse = q.data_ptr(), out.data_ptr(), lse.data_ptr()
        self.library.attend_prefix(call)
        return Attended(out, lse)

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
        tokens, group = len(rows.slots), q.shape[1] // len(rows.slots)
        out = torch.empty((tokens, q.shape[0] * group, v.shape[3]), dtype=q.dtype)
        before, lse = shared.out.contiguous(), shared.lse.contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        q, strides = _folded(q, group)
        call = own_call(rows, q.dtype, strides, k, v, group, scale=scale, window=window, softcap=softcap)
        call.q, call.out, call.sinks = q.data_ptr(), out.data_ptr(), pointer(sinks)
        call.shared, call.shared_lse, call.parts = before.data_ptr(), lse.data_ptr(), before.shape[0]
        self.library.attend_own(call)
        return out


def prefix_call(
    q_type: torch.dtype,
    q_strides: tuple[int, int, int],
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    group: int,
    tokens: int,
    begin: int,
    *,
    scale: float,
    window: int,
    softcap: float | None,
) -> PrefixCall:
    """All but q and where the results go. `positions` have to outlive it; `q_strides` count over KV heads, tokens, and
    query heads of a group."""
    (kv_heads, keys, dim), v_dim, rows = k.shape, v.shape[2], tokens * group
    if positions is not None and k.dtype == torch.bfloat16:  # what each task turns and fetches is its keys' part
        rows_per_task = _most_rows(max(dim, v_dim), k.dtype)
    else:
        rows_per_task = _rows_per_task(rows, kv_heads, max(dim, v_dim), k.dtype)
    tasks = kv_heads * -(-rows // rows_per_task)
    q_head, q_token, q_member = q_strides
    return PrefixCall(
        k=pointer(k), v=pointer(v), positions=pointer(positions), q_type=TYPES[q_type], kv_type=TYPES[k.dtype],
        kv_heads=kv_heads, group=group, tokens=tokens, keys=keys, dim=dim, v_dim=v_dim, q_head=q_head,
        q_token=q_token, q_member=q_member, k_head=k.stride(0), k_token=k.stride(1), v_head=v.stride(0),
        v_token=v.stride(1), o_head=rows * v_dim, o_token=group * v_dim, window=window, begin=begin,
        parts=1 if positions is None else _parts(tasks, keys - begin), rows_per_task=rows_per_task, scale=scale,
        softcap=softcap or 0.0,
    )  # fmt: skip


def shared_call(
    rows: DecodeRows,
    q_type: torch.dtype,
    q_strides: tuple[int, int, int],
    k: Tensor,
    v: Tensor,
    group: int,
    *,
    scale: float,
    window: int,
    softcap: float | None,
) -> PrefixCall:
    """Of a decode step over the document k, v [kv_heads, keys, dim]; lives no longer than `rows`."""
    keys = k.shape[1]
    positions = rows.remember(("positions", keys), lambda: rows.local + keys)
    nearest = rows.remember(("nearest",), lambda: int(rows.local.min()))
    begin = min(max(0, keys + nearest - window + 1), keys)
    return prefix_call(
        q_type, q_strides, k, v, positions, group, len(rows.slots), begin, scale=scale, window=window, softcap=softcap
    )


def own_call(
    rows: DecodeRows,
    q_type: torch.dtype,
    q_strides: tuple[int, int, int],
    k: Tensor,
    v: Tensor,
    group: int,
    *,
    scale: float,
    window: int,
    softcap: float | None,
) -> OwnCall:
    """Of a decode step over the own tokens k, v [slots, kv_heads, capacity, dim], all but q, the document's part, sinks
    and where the result goes; lives no longer than `rows`."""
    kv_heads, dim, v_dim, tokens = k.shape[1], k.shape[3], v.shape[3], len(rows.slots)
    counts, lengths = rows.remember(
        ("slots",), lambda: (torch.tensor(rows.counts), torch.tensor(rows.lengths))
    )  # int64
    q_head, q_token, q_member = q_strides
    return OwnCall(
        k=pointer(k), v=pointer(v), counts=pointer(counts), lengths=pointer(lengths), q_type=TYPES[q_type],
        kv_type=TYPES[k.dtype], slots=len(rows.counts), kv_heads=kv_heads, group=group, tokens=tokens, dim=dim,
        v_dim=v_dim, q_head=q_head, q_token=q_token, q_member=q_member, k_slot=k.stride(0), k_head=k.stride(1),
        k_token=k.stride(2), v_slot=v.stride(0), v_head=v.stride(1), v_token=v.stride(2), window=window,
        rows_per_task=_rows_per_task(tokens * group, kv_heads, max(dim, v_dim), k.dtype), scale=scale,
        softcap=softcap or 0.0,
    )  # fmt: skip


def load_library() -> Library:
    """This process's one.

    Raises:
        BuildFailed: nothing can be built here.
        OSError: what was built cannot be loaded.
    """
    folder = user_cache_dir() / "native"
    path = build(folder)
    try:
        return Library(path)
    except OSError:  # a power cut can leave a file without its bytes
        path.unlink(missing_ok=True)
        return Library(build(folder))


def _folded(q: Tensor, group: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Folded q, and its strides over KV heads, tokens, and query heads of a group."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    return q, (q.stride(0), q.stride(1) * group, q.stride(1))


def _rows_per_task(rows: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
    low, _ = ROWS_PER_TASK[dtype]
    fair = -(-rows * kv_heads // (TASKS_PER_THREAD * torch.get_num_threads()))
    wanted = min(_most_rows(dim, dtype), max(low, fair))
    return -(-wanted // low) * low


def _most_rows(dim: int, dtype: torch.dtype) -> int:
    low, high = ROWS_PER_TASK[dtype]
    return max(low, min(high, FLOATS_PER_TASK // dim))


def _parts(tasks: int, keys: int) -> int:
    """Into how many the document is cut, so that every thread has enough to do."""
    threads = torch.get_num_threads()
    if threads == 1:
        return 1
    return max(1, min(-(-TASKS_PER_THREAD * threads // tasks), keys // KEYS_PER_PART))
