"""KV of a run of tokens as the bytes of one safetensors file, and back.

The layout is canonical and rank-free: `k.<layer>` and `v.<layer>`, each [kv_heads, tokens, head_dim], in the
compute dtype. The only codec is `none`: the numbers as they are.
"""

from safetensors import SafetensorError
from safetensors.torch import load, save

from kernels.errors import ChunkMismatch
from kernels.kv import PrefixKV

CODEC = "none"
LAYOUT = "layer-heads-tokens-dim"


def encode_chunk(kv: PrefixKV, start: int, stop: int) -> bytes:
    """The tokens [start, stop) of every layer."""
    tensors = {}
    for layer in sorted(kv.keys):
        tensors[f"k.{layer}"] = kv.keys[layer][:, start:stop].contiguous().cpu()
        tensors[f"v.{layer}"] = kv.values[layer][:, start:stop].contiguous().cpu()
    data: bytes = save(tensors)
    return data


def decode_chunk(data: bytes, kv: PrefixKV, start: int, stop: int, *, dtype: str, device: str) -> None:
    """Writes a chunk's tensors at [start, stop) of `kv`, or none of them.

    Raises:
        ChunkMismatch: not a chunk, or of another shape or dtype than asked for or than what `kv` holds already.
    """
    try:
        tensors = load(data)
    except (SafetensorError, KeyError) as exc:  # KeyError: a dtype that safetensors knows and torch does not
        raise ChunkMismatch("it is not a safetensors file") from exc
    num_layers, odd = divmod(len(tensors), 2)
    names = {f"{part}.{layer}" for part in "kv" for layer in range(num_layers)}
    if odd or not tensors or names != tensors.keys() or (kv.keys and names != _names(kv)):
        raise ChunkMismatch("its layers are not complete")
    for name, tensor in tensors.items():
        if str(tensor.dtype) != f"torch.{dtype}":
            raise ChunkMismatch(f"its numbers are {tensor.dtype}, not {dtype}")
        if tensor.dim() != 3 or tensor.shape[1] != stop - start:
            raise ChunkMismatch(f"{name} holds {tuple(tensor.shape)}, not {stop - start} tokens")
    for held, part in ((kv.keys, "k"), (kv.values, "v")):
        for layer, tensor in held.items():
            heads, _, dim = tensor.shape
            shape = tuple(tensors[f"{part}.{layer}"].shape)
            if shape != (heads, stop - start, dim):  # would be broadcast, or fail halfway
                raise ChunkMismatch(f"{part}.{layer} holds {shape}, the chunks before it {heads} heads of {dim}")
    for layer in range(num_layers):
        kv.write(layer, start, tensors[f"k.{layer}"].to(device), tensors[f"v.{layer}"].to(device))


def _names(kv: PrefixKV) -> set[str]:
    return {f"{part}.{layer}" for part in "kv" for layer in kv.keys}
