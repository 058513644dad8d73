"""Fewer questions at a time where memory runs out."""

import logging
from collections.abc import Callable, Iterable, Iterator

import torch

from kernels.decode import Decoder, DecodeRequest, DecodeResult, failed
from kernels.errors import AnswerTooLarge, BatchTooLarge

log = logging.getLogger(__name__)


def answer_all(
    new_decoder: Callable[[int], Decoder],
    requests: Iterable[DecodeRequest],
    is_cancelled: Callable[[int], bool],
    *,
    max_batch: int,
) -> Iterator[DecodeResult]:
    """As `Decoder.run`, by decoders of `new_decoder(max_batch)`. Where one runs out of memory, what it had under way is
    begun again with half as many questions at a time. A question that is too large alone yields an error result, and
    the others go on as many at a time as before."""
    waiting, batch = iter(requests), max_batch
    while True:
        try:
            yield from new_decoder(batch).run(waiting, is_cancelled)
            return
        except BatchTooLarge as exc:
            under_way: list[DecodeRequest] = exc.requests
        # Only here, behind the error and all that its traceback holds, has the decoder let go of its memory.
        _give_back()
        if len(under_way) > 1:
            batch = len(under_way) // 2
            log.warning("not enough memory for %d questions at a time: going on with %d", len(under_way), batch)
        else:
            for request in under_way:
                log.warning("not enough memory for question %d alone", request.key)
                yield failed(request, AnswerTooLarge(len(request.question_ids), request.params.max_new_tokens))
            under_way, batch = [], max_batch
        waiting = _Again(under_way, waiting)


class _Again(Iterator[DecodeRequest]):
    """Requests to begin again, then the others, which may run dry and have more later."""

    def __init__(self, first: list[DecodeRequest], then: Iterator[DecodeRequest]) -> None:
        self._first, self._then = iter(first), then

    def __next__(self) -> DecodeRequest:
        return next(self._first, None) or next(self._then)


def _give_back() -> None:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        getattr(torch, accelerator.type).empty_cache()
