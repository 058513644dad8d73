"""How much memory reading and answering take, before they begin. docs/memory.md has the formula and what was measured.

Everything is counted in bytes. What a layer needs while it computes is counted for the layer that needs most, since
layers follow each other and give back what they took.
"""

from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kernels.codecs import CODECS
from kernels.errors import MemoryExceeded
from kernels.layout import KVLayout
from kernels.model import LanguageModel

WIDE = 4  # bytes of a float32, in which attention adds up
STORING = 2  # chunks under way to the store: one encoded, one waiting


@dataclass(frozen=True)
class Need:
    """Bytes by what takes them; `total` is the peak."""

    weights: int
    prefix_kv: int
    suffix_kv: int
    activations: int
    codec: int

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @property
    def beyond_weights(self) -> int:
        """What is still to be taken where the model is loaded."""
        return self.total - self.weights


def prefill_need(model: LanguageModel, num_tokens: int, *, chunk_tokens: int, codec: str = "none") -> Need:
    """Reading a document of so many tokens in chunks, and storing them in a codec. One that is not lossless is measured
    against a second KV, of what a reader will decode."""
    layout, chunk = model.layout, min(chunk_tokens, num_tokens)
    copies = 1 if CODECS[codec].lossless else 2
    windows = sum(_token_bytes(layout, layer) * (width - 1 + chunk) for layer, width in layout.windows.items())
    states = _state_bytes(layout)
    return Need(
        weights=weight_bytes(model.hf),
        prefix_kv=copies * (prefix_bytes(layout, num_tokens) + windows + states),
        suffix_kv=0,
        activations=activation_bytes(model, chunk, logits=1),
        codec=STORING * prefix_bytes(layout, chunk),
    )


def decode_need(
    model: LanguageModel, num_tokens: int, *, slots: int, slot_tokens: int, step_tokens: int, loaded: bool = False
) -> Need:
    """Answering `slots` questions at once behind a document of so many tokens: each has room for `slot_tokens`, and a
    step runs at most `step_tokens` of them. `loaded`: the document's KV is there already."""
    layout = model.layout
    windows = sum(_token_bytes(layout, layer) * (width - 1) for layer, width in layout.windows.items())
    states = _state_bytes(layout)
    own = slot_tokens * sum(_token_bytes(layout, layer) for layer in layout.tokens)
    return Need(
        weights=weight_bytes(model.hf),
        prefix_kv=0 if loaded else prefix_bytes(layout, num_tokens) + windows + states,
        suffix_kv=slots * (own + states),
        activations=activation_bytes(model, step_tokens, logits=slots),
        codec=0,
    )


def weight_bytes(hf: nn.Module) -> int:
    """Of this process: its part where several ranks hold the model. Weights that are tied are counted once."""
    parts = {id(part): part for part in (*hf.parameters(), *hf.buffers())}
    local = [part.to_local() if hasattr(part, "to_local") else part for part in parts.values()]
    return sum(part.numel() * part.element_size() for part in local)


def prefix_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Of the layers that keep every token."""
    return num_tokens * sum(_token_bytes(layout, layer) for layer in layout.token_layers)


def activation_bytes(model: LanguageModel, tokens: int, *, logits: int) -> int:
    """What a step over so many tokens takes at its peak and gives back: the residual stream, and the wider of the MLP
    (gate, up and their product) and the attention (queries before and after rotation, its output in float32), or the
    logits of so many tokens, in the model's dtype and in float32."""
    config = model.hf.config.get_text_config()
    size = model.dtype.itemsize
    hidden = int(config.hidden_size)
    inner = _inner_size(config, hidden)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    key_dim, value_dim = _widest(model.layout, hidden // heads if heads else 0)
    attention = tokens * heads * (4 * key_dim * size + 3 * value_dim * WIDE)
    mlp = tokens * inner * 3 * size
    vocab = logits * int(config.vocab_size) * (size + 2 * WIDE)
    return tokens * hidden * 3 * size + max(attention, mlp) + vocab


def available_bytes(device: torch.device) -> int:
    """What can still be taken on the device: free, or held by torch for later use. On a CPU what the system could give
    without swapping, within the limits of the process's control groups."""
    if device.type != "cpu":
        backend: Any = getattr(torch, device.type)
        free, _ = backend.mem_get_info(device)
        return int(free) + int(backend.memory_reserved(device)) - int(backend.memory_allocated(device))
    return min([_meminfo(), *_group_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def check_room(need: Need, device: torch.device, what: str, *, available: int | None = None) -> None:
    """Before anything is taken; the weights are there already.

    Raises:
        MemoryExceeded: it will not fit.
    """
    free = available_bytes(device) if available is None else available
    if need.beyond_weights > free:
        raise MemoryExceeded(what, need.beyond_weights, free, str(device), _advice(need))


def _advice(need: Need) -> str:
    if need.suffix_kv > need.prefix_kv:
        return "Lower PLATEMAKER_MAX_BATCH, ask for shorter answers"
    if need.activations > need.prefix_kv:
        return "Lower PLATEMAKER_CHUNK_TOKENS"
    return "Lower PLATEMAKER_MEMORY_CACHE_MB, use the codec none, split the document"


def _token_bytes(layout: KVLayout, layer: int) -> int:
    joined = 2 if layer in layout.latent else 1  # attention reads both side by side, which is another copy
    return layout.token_bytes(layer) * joined


def _state_bytes(layout: KVLayout) -> int:
    """Of one row."""
    return sum(prod(state.shape) * state.dtype.itemsize for state in layout.recurrent.values())


def _widest(layout: KVLayout, otherwise: int) -> tuple[int, int]:
    shapes = layout.tokens.values()
    return (
        max((shape.key_dim for shape in shapes), default=otherwise),
        max((shape.value_dim for shape in shapes), default=otherwise),
    )


def _inner_size(config: Any, hidden: int) -> int:
    """Of the MLP; of a mixture of experts, all that a token goes through."""
    dense = int(getattr(config, "intermediate_size", 0) or 0)
    expert = int(getattr(config, "moe_intermediate_size", 0) or 0) or dense
    chosen = int(getattr(config, "num_experts_per_tok", 0) or 0)
    return max(dense, expert * chosen) or 4 * hidden


def _meminfo() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62  # an old kernel; there is no telling


def _group_rooms(mount: Path, membership: Path) -> list[int]:
    """What each control group (version 2, or the memory controller of version 1) around this process leaves."""
    rooms = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):
            if (folder / limit).exists() and (folder / limit).read_text().strip() != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                taken = int((folder / used).read_text()) - int(stat.get(cache, 0))
                rooms.append(max(int((folder / limit).read_text()) - taken, 0))
            if folder == base:
                break
    return rooms
