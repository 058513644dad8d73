"""In the place of torch_musa: a device "musa" that computes on the CPU, and as strict as a real one about whose memory
a tensor lies in. torch's PrivateUse1, renamed.

FAKE_MUSA_CARDS: how many there are (default 1). FAKE_MUSA_FLASH: what its flash attention does: "right" (default),
"wrong", "raises", or "missing".
"""

import os
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

SCHEMA = (
    "_scaled_dot_product_attention_flash_musa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
)
FLASH = SCHEMA.partition("(")[0]
calls: list[str] = []  # the names of what ran on the device


class _Module:
    """torch.musa"""

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return int(os.environ.get("FAKE_MUSA_CARDS", "1"))

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "Fake MTT S5000"

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return 60 << 30, 80 << 30

    def synchronize(self, device: object = None) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class OnCard(torch.Tensor):
    """Its numbers lie in `raw`, on the CPU."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "OnCard":
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device="musa:0"
        )
        made.raw = raw
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({self.raw})"

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # in inference mode it arrives whole
    calls.append(name)
    known: dict[int, torch.Tensor] = {}
    strangers = []

    def lower(value: Any) -> Any:
        if isinstance(value, OnCard):
            known[id(value.raw)] = value
            return value.raw
        if isinstance(value, torch.Tensor):
            known[id(value)] = value
            if value.dim():
                strangers.append(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    lowered, options = tree_map(lower, args), tree_map(lower, kwargs)
    if strangers and name not in ("copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got some on the CPU")
    made = _flash(*lowered, **options) if name == FLASH else func(*lowered, **options)
    target = kwargs.get("device")
    leaves = target is not None and torch.device(target).type == "cpu"

    def lift(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return value if leaves else OnCard(value)

    return tree_map(lift, made)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fault = os.environ.get("FAKE_MUSA_FLASH", "right")
    if fault == "raises":
        raise RuntimeError("MUDNN: this shape is not supported")
    assert query.shape[1] == key.shape[1], "it repeats no KV heads"
    scores = query.float() @ key.float().transpose(2, 3) * (scale or query.shape[3] ** -0.5)
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    if fault == "wrong":
        lse = lse / 0.6931  # as if it were of base 2
    return (scores.softmax(-1) @ value.float()).to(query.dtype), lse, torch.empty(0)


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> OnCard:
    return OnCard(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> OnCard:
    return OnCard(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Where torch copies below Python, as `torch.tensor(.., device="musa")` does."""
    lowered = [part.raw if isinstance(part, OnCard) else part for part in (source, target)]
    lowered[1].copy_(lowered[0])
    return target


_setup_privateuseone_for_python_backend(rename="musa", backend_module=_Module())
torch.Tensor.pin_memory = lambda self, device=None: self.clone()  # its memory is the CPU's
_factories = torch.library.Library("aten", "IMPL")
_factories.impl("_copy_from", _copy_from, "PrivateUse1")
_factories.impl("empty.memory_format", _empty, "PrivateUse1")
_factories.impl("empty_strided", _empty_strided, "PrivateUse1")
if os.environ.get("FAKE_MUSA_FLASH") != "missing":
    _operators = torch.library.Library("aten", "FRAGMENT")
    _operators.define(SCHEMA)
