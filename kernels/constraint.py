"""Answers of a wanted form: which tokens may come next, from llguidance's parser (MIT, github.com/guidance-ai).

A grammar is over bytes, so a token may hold part of a character. Where several texts can follow, every token that
begins one of them is allowed; where only one can, it is written in the tokenizer's own tokens, as the model knows it.
"""

from functools import lru_cache
from typing import Any, Protocol

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from kernels.errors import ConstraintFailed, ConstraintRefused
from kernels.grammar import LIMITS, grammar_of, reason_of
from kernels.params import GenerationParams

KEPT_GRAMMARS = 256


class Constraint(Protocol):
    """Where one answer stands in what it is held to. `is_complete`: nothing can be added any more."""

    is_complete: bool

    def mask(self, logits: Tensor, *, may_end: bool) -> None:
        """Sets what cannot come next to -inf, in place; `logits` is [vocab]."""

    def accept(self, token: int) -> None:
        """
        Raises:
            ConstraintFailed: the answer cannot go on behind it.
        """

    def text(self, ids: list[int]) -> str:
        """Exactly what was matched."""


class Grammars:
    """The grammars of one tokenizer, each compiled once.

    Raises:
        ConstraintRefused: the tokenizer is of a kind whose tokens' bytes are not known.
    """

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self._stop_ids = stop_ids
        try:
            self._tokens: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=sorted(stop_ids))
        except Exception as exc:  # its parts fail in any way they like
            reason = "the model's tokenizer cannot be held to it; use a model with a tokenizer.json"
            raise ConstraintRefused("form", reason) from exc
        self._compiled = lru_cache(KEPT_GRAMMARS)(self._compile)

    def start(self, params: GenerationParams) -> Constraint:
        """For one answer.

        Raises:
            ConstraintRefused: the grammar cannot be used, with the reason.
        """
        return GrammarConstraint(self._compiled(grammar_of(params)).deep_copy(), self._tokens, self._stop_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ConstraintRefused("form", reason_of(matcher.get_error()))
        return matcher


class GrammarConstraint:
    """Where one answer stands in its grammar. `is_complete`: nothing can be added any more.

    Raises:
        ConstraintFailed: from the constructor and from `accept`; no token can come next, or it takes too much to know.
    """

    def __init__(self, matcher: LLMatcher, tokens: LLTokenizer, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._stop_ids = torch.tensor(sorted(stop_ids))
        self._num_tokens = 0
        self._look()

    def mask(self, logits: Tensor, *, may_end: bool) -> None:
        """Sets what cannot come next to -inf, in place; `logits` is [vocab]. Where only the end can come, it can
        whatever `may_end` says."""
        forbidden = torch.ones(logits.shape[0], dtype=torch.bool)
        known = min(len(forbidden), len(self._allowed))
        torch.logical_not(self._allowed[:known], out=forbidden[:known])
        if not may_end and not self.is_complete:
            forbidden[self._stop_ids] = True
        logits.masked_fill_(forbidden.to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._num_tokens += 1
        self._look()

    def text(self, ids: list[int]) -> str:
        """Exactly what was matched."""
        text: str = self._tokens.decode_str(ids)
        return text

    def _look(self) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ConstraintFailed(self._num_tokens, reason_of(self._matcher.get_error()))
        self._allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little").view(np.bool_))
        self.is_complete = int(self._allowed.sum()) == int(self._allowed[self._stop_ids].sum())
        if self.is_complete and not self._matcher.is_accepting():
            raise ConstraintFailed(self._num_tokens, "the model has no token for what must come next")
