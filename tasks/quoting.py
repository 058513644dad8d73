"""Asking for the words of the document behind each answer that wants them, in the same batch, over the same KV."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from kernels.decode import DecodeRequest, DecodeResult
from kernels.params import GenerationParams
from kernels.phrases import MOST_QUOTE_TOKENS, QUOTE_PROMPT
from kernels.prompt import Prompter
from kernels.quote import Quote, QuoteIndex

QUOTING = GenerationParams(max_new_tokens=MOST_QUOTE_TOKENS)


class Answered(NamedTuple):
    """`quote_prompt` says how the quote was asked for; None: it was not, or the asking failed."""

    result: DecodeResult
    quote_prompt: str | None = None
    quote: Quote | None = None


class _Wanted(NamedTuple):
    question: str
    request: DecodeRequest
    quotes: QuoteIndex


class Quoting(Iterator[DecodeRequest]):
    """The requests of a run: those that follow an answer, then new ones. May run dry and have more later."""

    def __init__(self, prompter: Prompter, new: Iterable[DecodeRequest]) -> None:
        self._prompter = prompter
        self._new = iter(new)
        self._following: deque[DecodeRequest] = deque()
        self._wanted: dict[int, _Wanted] = {}
        self._answers: dict[int, DecodeResult] = {}  # whose quotes are under way

    def __next__(self) -> DecodeRequest:
        return self._following.popleft() if self._following else next(self._new)

    def want(self, request: DecodeRequest, question: str, quotes: QuoteIndex) -> None:
        """Once this request is answered, its quote is asked for."""
        self._wanted[request.key] = _Wanted(question, request, quotes)

    def take(self, result: DecodeResult) -> Answered | None:
        """None: the answer is kept back until its quote is there. A quote that fails leaves the answer as it is."""
        wanted = self._wanted.get(result.key)
        if wanted is None:
            return Answered(result)
        answer = self._answers.pop(result.key, None)
        if answer is None:
            if result.error is not None or result.finish == "cancelled" or not result.text:
                del self._wanted[result.key]
                return Answered(result)
            self._answers[result.key] = result
            ids = self._prompter.quote_ids(wanted.question, result.text)
            request = replace(wanted.request, question_ids=ids, params=QUOTING, quotes=wanted.quotes)
            self._following.append(request)
            return None
        del self._wanted[result.key]
        if result.finish == "cancelled":
            return Answered(result)
        answer = replace(answer, device_s=answer.device_s + result.device_s)
        if result.error is not None:
            return Answered(answer)
        return Answered(answer, QUOTE_PROMPT, wanted.quotes.quote(result.token_ids))
