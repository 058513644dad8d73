"""The layers of a Llama-like model in one call of decoder.cpp, over the tokens of a decode step or of a part of a
document."""

from collections.abc import Mapping, Sequence
from ctypes import addressof
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from kernels.kv import PrefixKV, SuffixKV
from kernels.layout import LayerShape
from kernels.native.backend import own_call, prefix_call, shared_call
from kernels.native.library import (
    BestCall,
    DecoderCall,
    DecoderLayer,
    Library,
    LinearCall,
    OwnCall,
    PrefixCall,
    pointer,
)
from kernels.native.linear import MOST_ROWS, PAIR_DEPTH, PAIR_ROWS, NativeLinear
from kernels.rows import EVERYTHING, DecodeRows
from kernels.sampling import Look

CACHE_LINE = 64  # bytes
BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
PREFIX_CALL, OWN_CALL = np.dtype(PrefixCall), np.dtype(OwnCall)
Calls = npt.NDArray[Any]  # [layers, documents] of one of these


class NotLlamaLike(Exception):
    """The model is built in another way; the reason says what is."""


class Part(Protocol):
    """One document with its questions' new tokens."""

    @property
    def prefix(self) -> PrefixKV: ...
    @property
    def suffix(self) -> SuffixKV: ...
    @property
    def seen(self) -> DecodeRows: ...


class Places(NamedTuple):
    """Where each layer's keys and values are, and the first layer whose are alike in all else."""

    k: npt.NDArray[np.uint64]
    v: npt.NDArray[np.uint64]
    like: list[int]

    @classmethod
    def of(cls, layers: Sequence[tuple[Tensor, Tensor, int]]) -> "Places":
        keys = np.array([k.data_ptr() for k, _, _ in layers], dtype=np.uint64)
        values = np.array([v.data_ptr() for _, v, _ in layers], dtype=np.uint64)
        first: dict[tuple[Any, ...], int] = {}
        kinds = [(k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype, base) for k, v, base in layers]
        return cls(keys, values, [first.setdefault(kind, at) for at, kind in enumerate(kinds)])


class NativeDecoder:
    """Keeps nothing from step to step but, beside keys and values, where they are; the weights are the model's own.

    In float32 it takes the few tokens of decode steps. In bfloat16, where the CPU multiplies pairs, all there are; what
    goes from layer to layer is float32 then too, so less is rounded than where each layer gives bfloat16.
    """

    def __init__(self, hf: PreTrainedModel, library: Library) -> None:
        """
        Raises:
            NotLlamaLike
        """
        _demand({"model", "lm_head"} == _children(hf) and _children(hf.model) == BODY, "the model")
        _demand(not any(module._forward_hooks or module._forward_pre_hooks for module in hf.modules()), "a hook")
        self.body, self.head = hf.model, hf.lm_head
        self.library, self.dtype = library, self.head.weight.dtype
        self.pairs = self.dtype == torch.bfloat16 and library.pairs > 0
        _demand(self.pairs or self.dtype == torch.float32, "the dtype")
        layers = list(self.body.layers)
        for layer in layers:
            _check_layer(layer, self.dtype)
        attention = layers[0].self_attn
        self._wide: dict[int, Tensor] = {}  # small parameters in float32
        self.dim = int(attention.head_dim)
        self.hidden, self.inner = layers[0].mlp.gate_proj.weight.shape[::-1]
        self.heads, self.kv_heads = (each.out_features // self.dim for each in (attention.q_proj, attention.k_proj))
        self.shape = LayerShape(self.kv_heads, self.dim, self.dim)
        self.width = self._rope(torch.zeros(1, dtype=torch.int64))[0].shape[1]
        _demand(self.width <= self.dim and self.width % 2 == 0, "the rotation")
        if self.pairs:
            deep = (self.hidden, self.inner, self.heads * self.dim, self.dim)
            _demand(all(size % PAIR_DEPTH == 0 for size in deep), "the size")
            _demand(self.head.weight.shape[0] % PAIR_ROWS == 0, "the size of the vocabulary")
            _demand(self.head.bias is None and type(self.head) is nn.Linear, "the head")
            for parameter in hf.parameters():  # all, so that nothing of the file stays mapped
                _align(parameter)
        self.weights = (DecoderLayer * len(layers))(*map(self._weights, layers))
        self.layers = [(layer.self_attn.layer_idx, float(layer.self_attn.scaling)) for layer in layers]

    def takes(self, parts: Sequence[Part]) -> bool:
        """False for many tokens of float32, which torch multiplies as fast, and for a document that is still being
        loaded, since other steps wait for each layer by itself."""
        tokens = sum(len(part.seen.slots) for part in parts)
        return (self.pairs or tokens <= MOST_ROWS) and all(part.prefix.is_here for part in parts)

    def reads(self, kv: PrefixKV) -> bool:
        """Whether `read` takes the tokens of this document."""
        return self.pairs and kv.is_here and not kv.windows and not kv.layout.has_state

    def logits(self, parts: Sequence[Part], ids: Tensor, keep: Tensor | slice, windows: Mapping[int, int]) -> Tensor:
        """Runs the new tokens ids [tokens] of all parts, stores their keys and values, and returns the logits [kept,
        vocab] of those in `keep` in fp32. `windows`: the layers that see only so many tokens back.

        Raises:
            ChunkMismatch: a layer of a document was never filled.
        """
        with torch.inference_mode():
            positions = torch.cat([part.seen.local + part.prefix.length for part in parts])
            prefix, own = self._attention(parts, windows)
            return self._head(self._run(ids, positions, prefix, own)[keep])

    def look(self, logits: Tensor) -> Look:
        """At logits [rows, vocab] in fp32 on a CPU."""
        assert logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
        best, finite = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
        rows, size = logits.shape
        self.library.best(
            BestCall(
                scores=pointer(logits), best=pointer(best), finite=pointer(finite), rows=rows, row=logits.stride(0),
                size=size,
            )
        )  # fmt: skip
        return Look(finite.tolist(), best.tolist())

    def read(self, kv: PrefixKV, start: int, ids: Tensor, keep: int) -> Tensor:
        """Runs the tokens ids [tokens] of a document, of which `start` stand before them, stores their keys and values,
        and returns the logits [keep, vocab] of the last in fp32."""
        with torch.inference_mode():
            group, stop = self.heads // self.kv_heads, start + len(ids)
            strides = (group * self.dim, self.heads * self.dim, self.dim)
            prefix = np.empty((len(self.layers), 1), PREFIX_CALL)
            for at, (layer, scale) in enumerate(self.layers):
                k, v, _ = kv.layer(layer)
                assert k.shape == v.shape == (self.kv_heads, kv.capacity, self.dim) and stop <= kv.capacity
                assert k.dtype == v.dtype == self.dtype and k.stride(2) == v.stride(2) == 1, "of another model"
                call = prefix_call(
                    torch.float32, strides, k[:, :stop], v[:, :stop], None, group, len(ids), 0,
                    scale=scale, window=EVERYTHING, softcap=None,
                )  # fmt: skip
                prefix[at] = np.frombuffer(memoryview(call), PREFIX_CALL)
            x = self._run(ids, torch.arange(start, stop), prefix, None)
            return self._head(x[len(ids) - keep :])

    def _run(self, ids: Tensor, positions: Tensor, prefix: Calls, own: Calls | None) -> Tensor:
        """What leaves the last layer, [tokens, hidden] in fp32. Calls are [layers, documents]."""
        x: Tensor = self.body.embed_tokens(ids).float().contiguous()
        cos, sin = self._rope(positions)
        self.library.decoder_step(
            DecoderCall(
                x=pointer(x), cos=pointer(cos), sin=pointer(sin), layers=addressof(self.weights),
                prefix=prefix.ctypes.data, own=None if own is None else own.ctypes.data, num_layers=len(self.layers),
                documents=prefix.shape[1], tokens=len(ids), hidden=self.hidden, inner=self.inner, heads=self.heads,
                kv_heads=self.kv_heads, dim=self.dim, width=self.width, pairs=self.pairs,
            )
        )  # fmt: skip
        return x

    def _head(self, x: Tensor) -> Tensor:
        """Logits [tokens, vocab] in fp32."""
        if not self.pairs:
            logits: Tensor = self.head(self.body.norm(x))
            return logits
        x, weight = self.body.norm(x).float().contiguous(), self.head.weight
        out = torch.empty((len(x), len(weight)))
        self.library.linear(
            LinearCall(
                x=pointer(x), w=pointer(weight), bias=None, out=pointer(out), rows=len(x), **{"in": self.hidden},
                out_features=len(weight), x_row=x.stride(0), pairs=True,
            )
        )  # fmt: skip
        return out

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, rotated numbers of a head]."""
        cos, sin = self.body.rotary_emb(torch.empty(0), positions[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def _attention(self, parts: Sequence[Part], windows: Mapping[int, int]) -> tuple[Calls, Calls]:
        """The calls [layers, parts]. Layers of a part differ in where their keys and values lie, and seldom in more, so
        the rest is made once for all that are alike."""
        group = self.heads // self.kv_heads
        strides = (group * self.dim, self.heads * self.dim, self.dim)
        prefix, own = (np.empty((len(self.layers), len(parts)), call) for call in (PREFIX_CALL, OWN_CALL))
        for number, part in enumerate(parts):
            document, suffix, rows = part.prefix, part.suffix, part.seen
            far, near = self._places(document, suffix)
            alike: dict[tuple[int, float, int, int], list[int]] = {}
            for at, (layer, scale) in enumerate(self.layers):
                kind = (windows.get(layer, EVERYTHING), scale, far.like[at], near.like[at])
                alike.setdefault(kind, []).append(at)
            for (window, scale, *_), layers in alike.items():
                first, _ = self.layers[layers[0]]
                (k, v, base), (own_k, own_v) = document.layer(first), suffix.layer(first)
                held = document.length - base
                self._check(rows, held, k, v, own_k, own_v)
                how: dict[str, Any] = {"scale": scale, "window": window, "softcap": None}
                one = shared_call(rows, torch.float32, strides, k[:, :held], v[:, :held], group, **how)
                other = own_call(rows, torch.float32, strides, own_k, own_v, group, **how)
                prefix[layers, number] = np.frombuffer(memoryview(one), PREFIX_CALL)
                own[layers, number] = np.frombuffer(memoryview(other), OWN_CALL)
            prefix["k"][:, number], prefix["v"][:, number] = far.k, far.v
            own["k"][:, number], own["v"][:, number] = near.k, near.v
        return prefix, own

    def _places(self, document: PrefixKV, suffix: SuffixKV) -> tuple[Places, Places]:
        """
        Raises:
            ChunkMismatch: a layer of the document was never filled.
        """

        def far() -> Places:
            return Places.of([document.layer(layer) for layer, _ in self.layers])

        def near() -> Places:
            for layer, _ in self.layers:
                suffix.provide(layer, document.layer(layer).keys, self.shape)
            return Places.of([(*suffix.layer(layer), 0) for layer, _ in self.layers])

        return document.memo.remember("places", far), suffix.memo.remember("places", near)

    def _check(self, rows: DecodeRows, held: int, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> None:
        """Native code looks at no bounds."""
        longest = max(length + count for length, count in zip(rows.lengths, rows.counts, strict=True))
        for kept in (k, v):
            heads, room, dim = kept.shape
            assert (heads, dim, kept.stride(2)) == (*self.shape[:2], 1) and held <= room, "of another model"
        for kept in (own_k, own_v):
            slots, heads, room, dim = kept.shape
            assert (heads, dim, kept.stride(3)) == (*self.shape[:2], 1), "of another model"
            assert len(rows.counts) <= slots and longest <= room, "there is no room for these tokens"
        assert {each.dtype for each in (k, v, own_k, own_v)} == {self.dtype}, "of another model"

    def _weights(self, layer: Any) -> DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        q_size, kv_size = self.heads * self.dim, self.kv_heads * self.dim
        linears = {
            "q": (attention.q_proj, self.hidden, q_size),
            "k": (attention.k_proj, self.hidden, kv_size),
            "v": (attention.v_proj, self.hidden, kv_size),
            "o": (attention.o_proj, q_size, self.hidden),
            "gate": (mlp.gate_proj, self.hidden, self.inner),
            "up": (mlp.up_proj, self.hidden, self.inner),
            "down": (mlp.down_proj, self.inner, self.hidden),
        }
        norms = {
            "norm": (layer.input_layernorm, "norm_eps", self.hidden),
            "mlp_norm": (layer.post_attention_layernorm, "mlp_eps", self.hidden),
        }
        if _children(attention) >= HEAD_NORMS:
            norms["q_norm"] = (attention.q_norm, "q_eps", self.dim)
            norms["k_norm"] = (attention.k_norm, "k_eps", self.dim)
        given: dict[str, Any] = {"rotated": self.width if getattr(attention, "use_rope", True) else 0}
        for name, (linear, size, out) in linears.items():
            _demand(linear.weight.shape == (out, size), f"the size of {name}")
            given |= {name: pointer(linear.weight), f"{name}_bias": self._wide_pointer(linear.bias)}
        for name, (norm, eps, size) in norms.items():
            _demand(norm.weight.shape == (size,), f"the size of {name}")
            given |= {name: self._wide_pointer(norm.weight), eps: _eps(norm)}
        return DecoderLayer(**given)

    def _wide_pointer(self, parameter: Tensor | None) -> int | None:
        if parameter is None:
            return None
        wide = parameter.detach().float()
        self._wide[wide.data_ptr()] = wide
        return wide.data_ptr()


def _check_layer(layer: Any, dtype: torch.dtype) -> None:
    _demand(_children(layer) == LAYER and not layer._parameters, "a layer")
    attention, mlp = layer.self_attn, layer.mlp
    _demand(_children(attention) in (ATTENTION, ATTENTION | HEAD_NORMS) and not attention._parameters, "the attention")
    _demand(all(hasattr(attention, name) for name in ("head_dim", "scaling", "layer_idx")), "the attention")
    _demand(_children(mlp) == MLP and not mlp._parameters, "the feed-forward layer")
    _demand(isinstance(mlp.act_fn, SiLUActivation | nn.SiLU), "the activation")
    for name, module in layer.named_modules():
        if name.endswith("_proj"):
            _demand(type(module) in (NativeLinear, nn.Linear), "a linear layer")
            _demand(module.weight.dtype == dtype and module.weight.is_contiguous(), "a linear layer's dtype")
        elif name.endswith("norm"):
            _demand(_eps(module) is not None and list(module._parameters) == ["weight"], "a norm")
            _demand(module.weight.dtype == dtype, "a norm's dtype")


def _align(weight: Tensor) -> None:
    """Moves weights that do not begin with a cache line, as those mapped from a file seldom do: each row of a tile
    would lie in two lines, which takes twice as long."""
    if weight.data_ptr() % CACHE_LINE:
        weight.data = weight.data.clone()


def _eps(norm: nn.Module) -> float | None:
    found = getattr(norm, "variance_epsilon", None)
    return found if found is not None else getattr(norm, "eps", None)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise NotLlamaLike(f"{what} is another")
