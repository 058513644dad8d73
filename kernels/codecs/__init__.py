"""KV of a run of tokens as the bytes of one safetensors file, and back."""

from kernels.codecs.chunk import CODECS, LAYOUT, chunk_parts, decode_chunk, encode_chunk
from kernels.codecs.receiver import KVReceiver

__all__ = ["CODECS", "LAYOUT", "KVReceiver", "chunk_parts", "decode_chunk", "encode_chunk"]
