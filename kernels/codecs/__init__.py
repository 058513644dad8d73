"""KV of a run of tokens as the bytes of one safetensors file, and back."""

from kernels.codecs.chunk import CODECS, LAYOUT, decode_chunk, encode_chunk

__all__ = ["CODECS", "LAYOUT", "decode_chunk", "encode_chunk"]
