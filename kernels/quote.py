"""Quotes that are verbatim by construction: the only tokens that may come next are those that follow in the document.

The document's tokens are searched as an array: a match is the set of places where the tokens so far end, which shrinks
with each token, so a span costs one pass over the first token's places and then next to nothing (what a suffix
automaton would give, without building one). A token's place gives its characters, so a quote is document text
[start, stop), even where a character is cut into several tokens.

The words NONE stand behind the document as if they were its last. The model names no quote by writing them: it prefers
that where, token by token, they are likelier than every span of the document.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.errors import ConstraintRefused
from kernels.phrases import NONE
from kernels.words import WORD

LEAST_TOKENS = 4  # of a quote
_GAP = -1  # stands for no token
_OPENING = frozenset({"Ps", "Pi", "Sc"})  # Unicode's categories of opening brackets and quotes, and of currency signs

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


class Quote(NamedTuple):
    """Document text [start, stop)."""

    text: str
    start: int
    stop: int


class QuoteIndex:
    """The tokens of one document's text, and where its words begin and end.

    A quote begins with a word, an opening bracket, quote or currency sign, and ends behind a word or a mark.

    Raises:
        ConstraintRefused: the tokenizer does not say which characters its tokens stand for.
    """

    def __init__(self, tokenizer: Any, text: str, stop_ids: frozenset[int]) -> None:
        if not tokenizer.is_fast:
            reason = "the model's tokenizer does not say where its tokens stand; use a model with a tokenizer.json"
            raise ConstraintRefused("quote", reason)
        plain = {"add_special_tokens": False, "split_special_tokens": True}
        encoded = tokenizer(text, return_offsets_mapping=True, **plain)
        self.text = text
        self.stop_ids = sorted(stop_ids)
        none = tokenizer.encode(NONE, **plain)
        self.ids: _Ints = np.array([*encoded["input_ids"], _GAP, *none, _GAP], dtype=np.int64)
        self.num_tokens = len(encoded["input_ids"])
        self.none_at = self.num_tokens + len(none)  # the place of its last token
        self._offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        starts, self.may_end = self._borders()
        self.starts: _Ints = np.append(np.flatnonzero(starts), self.num_tokens + 1)
        self.first_ids: _Ints = self.ids[self.starts]
        self.bare_ids = self._bare_ids(tokenizer, plain)

    def start(self) -> "QuoteConstraint":
        """For one quote."""
        return QuoteConstraint(self)

    def quote(self, token_ids: Sequence[int]) -> Quote | None:
        """The first place in the document where these tokens stand, cut back to the last place where a quote may end,
        if there is one. None: they are NONE, or no tokens."""
        constraint = self.start()
        for token in token_ids:
            constraint.accept(token)
        places = constraint.places
        if not token_ids or self.none_at in places or not len(places):
            return None
        ending = places[self.may_end[places]]
        last = int((ending if len(ending) else places)[0])
        if last >= self.num_tokens:  # a part of NONE
            return None
        first = last - len(token_ids) + 1
        cut = next((at for at in range(last, first - 1, -1) if self.may_end[at]), last)
        start, stop = int(self._offsets[first][0]), int(self._offsets[first : cut + 1, 1].max())
        words = self.text[start:stop]
        start += len(words) - len(words.lstrip())
        return Quote(words.strip(), start, start + len(words.strip()))

    def _borders(self) -> tuple[_Bools, _Bools]:
        """For each token of `ids`: whether a quote may begin with it, and whether one may end behind it."""
        text, count = self.text, self.num_tokens
        border = np.ones(len(text) + 1, dtype=bool)
        for word in WORD.finditer(text):
            border[word.start() + 1 : word.end()] = False
        starts, ends = np.zeros(len(self.ids), dtype=bool), np.zeros(len(self.ids), dtype=bool)
        reached = 0  # the end of the characters that earlier tokens stand for
        whole_from = []
        for start, stop in self._offsets.tolist():
            whole_from.append(start >= reached)  # else it goes on with a character that was begun before
            reached = max(reached, stop)
        for at, (start, stop) in enumerate(self._offsets.tolist()):
            words = text[start:stop]
            shown = words.strip()
            if not shown:
                continue
            begin = start + len(words) - len(words.lstrip())
            end = begin + len(shown)
            first = shown[0]
            opens = first.isalnum() or first in "\"'§" or unicodedata.category(first) in _OPENING
            starts[at] = whole_from[at] and opens and border[begin]
            ends[at] = border[end] and (at + 1 == count or whole_from[at + 1])
        ends[self.none_at] = True
        return starts, ends

    def _bare_ids(self, tokenizer: Any, plain: dict[str, Any]) -> _Ints:
        """For each start the token without the blank before its word, which a model rather begins an answer with."""
        spaced = {}
        for at, token in zip(self.starts[:-1].tolist(), self.first_ids[:-1].tolist(), strict=True):
            words = self.text[slice(*self._offsets[at])]
            written = tokenizer.convert_ids_to_tokens(token) if words == words.lstrip() else words
            if token not in spaced and written[0] in " Ġ▁":
                spaced[token] = words.strip()
        bare: dict[int, int] = {}
        if spaced:
            for token, ids in zip(spaced, tokenizer(list(spaced.values()), **plain)["input_ids"], strict=True):
                if len(ids) == 1:
                    bare[token] = ids[0]
        return np.array([bare.get(token, token) for token in self.first_ids.tolist()], dtype=np.int64)


class QuoteConstraint:
    """Where one quote stands: `places` are all those of its last token so far. `is_complete`: nothing can follow."""

    def __init__(self, index: QuoteIndex) -> None:
        self._index = index
        self._num_tokens = 0
        self.places: _Ints = index.starts - 1
        self._look()

    def mask(self, logits: Tensor, *, may_end: bool) -> None:
        """Sets what cannot come next to -inf, in place; `logits` is [vocab]. A quote ends at a word border, and not
        before LEAST_TOKENS where more can follow, whatever `may_end` says."""
        allowed = self._following
        if self._may_end:
            allowed = np.append(allowed, self._index.stop_ids)
        ids = torch.from_numpy(allowed[allowed < len(logits)]).to(logits.device)
        scores = logits[ids]
        logits.fill_(float("-inf"))
        logits[ids] = scores

    def accept(self, token: int) -> None:
        index = self._index
        if self._num_tokens == 0:
            self.places = index.starts[(index.first_ids == token) | (index.bare_ids == token)]
        else:
            following = self.places + 1
            self.places = following[index.ids[following] == token]
        self._num_tokens += 1
        self._look()

    def text(self, ids: list[int]) -> str:
        """The quote; nothing where there is none."""
        found = self._index.quote(ids)
        return found.text if found else ""

    def _look(self) -> None:
        index = self._index
        if self._num_tokens == 0:
            following = np.concatenate([index.first_ids, index.bare_ids])
        else:
            following = index.ids[self.places + 1]
        self._following: _Ints = np.unique(following[following != _GAP])
        self.is_complete = not len(self._following)
        ends = bool(index.may_end[self.places].any()) and self._num_tokens > 0
        enough = self._num_tokens >= LEAST_TOKENS or index.none_at in self.places
        self._may_end = self.is_complete or (ends and enough)
