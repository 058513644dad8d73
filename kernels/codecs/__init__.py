"""KV of a run of tokens as the bytes of one safetensors file, and back."""

from kernels.codecs.chunk import CODECS, LAYOUT, chunk_parts, decode_chunk, encode_chunk
from kernels.codecs.receiver import KVReceiver
from kernels.codecs.state import decode_state, encode_state

__all__ = [
    "CODECS",
    "LAYOUT",
    "KVReceiver",
    "chunk_parts",
    "decode_chunk",
    "decode_state",
    "encode_chunk",
    "encode_state",
]
