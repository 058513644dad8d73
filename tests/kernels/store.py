"""What a snapshot store does with a document, in memory: chunks and the state behind each."""

from collections.abc import Sequence

from safetensors.torch import load

from kernels.codecs import decode_chunk, encode_chunk
from kernels.codecs.state import decode_state, encode_state
from kernels.kv import PrefixKV
from kernels.model import LanguageModel
from kernels.prefill import Prefilled, prefill


class Stored:
    def __init__(self, model: LanguageModel, ids: list[int]) -> None:
        self.model = model
        self.ids = ids
        self.chunks: dict[tuple[int, int], bytes] = {}
        self.states: dict[int, bytes] = {}

    def read(self, stops: Sequence[int]) -> Prefilled:
        return prefill(self.model, self.ids, stops=stops, on_chunk=self._put)

    def _put(self, kv: PrefixKV, start: int, stop: int) -> None:
        self.chunks[start, stop] = encode_chunk(kv, start, stop, "none")
        self.states[stop] = encode_state(kv)

    def load(self, length: int) -> PrefixKV:
        """The first `length` tokens, with room for the whole document."""
        kv = self.model.new_kv(len(self.ids))
        for (start, stop), data in self.chunks.items():
            if stop <= length:
                self._write(kv, start, stop, data)
        decode_state(self.states[length], kv, length, device="cpu")
        return kv

    def _write(self, kv: PrefixKV, start: int, stop: int, data: bytes) -> None:
        assert load(data).keys() == {f"{kind}.{layer}" for kind in "kv" for layer in kv.token_layers}
        if kv.token_layers:
            dtype = str(self.model.dtype).removeprefix("torch.")
            decode_chunk(data, kv, start, stop, codec="none", dtype=dtype, device="cpu")
