"""Choosing the next token, one question at a time, so that an answer does not depend on its batch."""

import hashlib

import torch
from torch import Tensor

from kernels.params import GenerationParams


class Sampler:
    """Draws the tokens of one answer. The same seed and question give the same draws in any batch, on any device."""

    def __init__(self, params: GenerationParams, question_ids: list[int]) -> None:
        self.params = params
        digest = hashlib.sha256(repr((params.seed, question_ids)).encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def draw(self, logits: Tensor) -> int:
        """The next token from logits [vocab] in fp32."""
        params = self.params
        if params.temperature == 0:
            return int(logits.argmax())
        scores, tokens = (logits.cpu() / params.temperature).sort(descending=True, stable=True)
        if params.top_k:
            scores = scores[: params.top_k]
        probs = scores.softmax(-1)
        if params.top_p < 1:
            before = probs.cumsum(-1) - probs
            probs = probs[: max(1, int((before < params.top_p).sum()))]
        return int(tokens[torch.multinomial(probs, 1, generator=self._generator)])
