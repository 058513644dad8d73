"""Attention of prefill and decode on a CPU by attention.cpp, in float32 inside."""

import torch
from torch import Tensor

from kernels.attention import Attended
from kernels.native.build import build
from kernels.native.library import TYPES, Library, pointer
from kernels.rows import DecodeRows, PrefillRows
from kernels.settings import user_cache_dir

FLOATS_PER_TASK = 24576  # of a task's sums; with the keys and values of a block they stay in a core's L2 cache
ROWS_PER_TASK = (48, 384)
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
        kv_heads, group = k.shape[0], q.shape[0] // k.shape[0]
        q = q if q.stride(-1) == 1 else q.contiguous()
        strides = (q.stride(0) * group, q.stride(1), q.stride(0))
        begin = max(0, k.shape[1] - rows.tokens + 1 - window)
        part = self._prefix(
            q, strides, k, v, None, kv_heads, group, rows.tokens, begin, scale=scale, window=window, softcap=softcap
        )
        return Attended(part.out[0], part.lse[0])

    def shared(
        self, rows: DecodeRows, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float | None
    ) -> Attended:
        keys, tokens = k.shape[1], len(rows.slots)
        group = q.shape[1] // tokens
        positions = rows.remember(("positions", keys), lambda: rows.local + keys)
        nearest = rows.remember(("nearest",), lambda: int(rows.local.min()))
        begin = min(max(0, keys + nearest - window + 1), keys)
        return self._prefix(
            *_folded(q, group), k, v, positions, k.shape[0], group, tokens, begin,
            scale=scale, window=window, softcap=softcap,
        )  # fmt: skip

    def _prefix(
        self,
        q: Tensor,
        q_strides: tuple[int, int, int],
        k: Tensor,
        v: Tensor,
        positions: Tensor | None,
        kv_heads: int,
        group: int,
        tokens: int,
        begin: int,
        *,
        scale: float,
        window: int,
        softcap: float | None,
    ) -> Attended:
        keys, v_dim, rows = k.shape[1], v.shape[2], tokens * group
        rows_per_task = _rows_per_task(rows, kv_heads, max(k.shape[2], v_dim))
        tasks = kv_heads * -(-rows // rows_per_task)
        parts = 1 if positions is None else _parts(tasks, keys - begin)
        out = torch.empty((parts, kv_heads, rows, v_dim))
        lse = torch.empty((parts, kv_heads, rows))
        q_head, q_token, q_member = q_strides
        self.library.attend_prefix(
            q=pointer(q), k=pointer(k), v=pointer(v), out=pointer(out), lse=pointer(lse), positions=pointer(positions),
            q_type=TYPES[q.dtype], kv_type=TYPES[k.dtype], kv_heads=kv_heads, group=group, tokens=tokens, keys=keys,
            dim=k.shape[2], v_dim=v_dim, q_head=q_head, q_token=q_token, q_member=q_member, k_head=k.stride(0),
            k_token=k.stride(1), v_head=v.stride(0), v_token=v.stride(1), window=window, begin=begin, parts=parts,
            rows_per_task=rows_per_task, scale=scale, softcap=softcap or 0.0,
        )  # fmt: skip
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
        kv_heads, tokens, v_dim = q.shape[0], len(rows.slots), v.shape[3]
        group = q.shape[1] // tokens
        counts, lengths = rows.remember(
            ("slots",), lambda: (torch.tensor(rows.counts), torch.tensor(rows.lengths))
        )  # int64
        out = torch.empty((tokens, kv_heads * group, v_dim), dtype=q.dtype)
        before, lse = shared.out.contiguous(), shared.lse.contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        q, (q_head, q_token, q_member) = _folded(q, group)
        self.library.attend_own(
            q=pointer(q), k=pointer(k), v=pointer(v), out=pointer(out), shared=pointer(before),
            shared_lse=pointer(lse), sinks=pointer(sinks), counts=pointer(counts), lengths=pointer(lengths),
            q_type=TYPES[q.dtype], kv_type=TYPES[k.dtype], slots=len(rows.counts), kv_heads=kv_heads, group=group,
            tokens=tokens, dim=k.shape[3], v_dim=v_dim, q_head=q_head, q_token=q_token, q_member=q_member,
            k_slot=k.stride(0), k_head=k.stride(1), k_token=k.stride(2), v_slot=v.stride(0), v_head=v.stride(1),
            v_token=v.stride(2), window=window, parts=before.shape[0],
            rows_per_task=_rows_per_task(tokens * group, kv_heads, max(k.shape[3], v_dim)), scale=scale,
            softcap=softcap or 0.0,
        )  # fmt: skip
        return out


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


def _rows_per_task(rows: int, kv_heads: int, dim: int) -> int:
    low, high = ROWS_PER_TASK
    fair = -(-rows * kv_heads // (TASKS_PER_THREAD * torch.get_num_threads()))
    wanted = min(max(low, min(high, FLOATS_PER_TASK // dim)), max(low, fair))
    return -(-wanted // low) * low


def _parts(tasks: int, keys: int) -> int:
    """Into how many the document is cut, so that every thread has enough to do."""
    threads = torch.get_num_threads()
    if threads == 1:
        return 1
    return max(1, min(-(-TASKS_PER_THREAD * threads // tasks), keys // KEYS_PER_PART))
