"""The one-piece way as the yardstick, then the split, over the same document, questions and greedy answers."""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kernels.decode import Decoder, DecodeRequest
from kernels.params import GenerationParams
from kernels.prefill import chunk_stops, prefill
from pipeline.errors import BaselineFailed
from pipeline.insight.percentiles import Spread, spread
from pipeline.insight.workbench import answers_of, ask, first_error, read, reading_of, workbench
from tasks.decode import answer_waiting
from tasks.engine import Engine


@dataclass
class Way:
    """Seconds of each run. `first_token_s` is from when a question is taken up until its first token, reading its
    document included where it has to be; its median over the questions. `total_s` is until all are answered."""

    prefill_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    memory_mb: float = 0.0
    answers: list[str] = field(default_factory=list)

    def spreads(self) -> dict[str, Spread]:
        named = {"prefill": self.prefill_s, "first token": self.first_token_s, "total": self.total_s}
        return {name: found for name, values in named.items() if (found := spread(values)) is not None}


@dataclass(frozen=True)
class Baseline:
    """What was measured. Memory is the largest the process took so far, so the split's holds the one-piece way's."""

    model: str
    device: str
    dtype: str
    document_tokens: int
    questions: int
    output_tokens: int
    runs: int
    one_piece: Way
    split: Way

    @property
    def equal_answers(self) -> int:
        return sum(one == other for one, other in zip(self.one_piece.answers, self.split.answers, strict=True))

    @property
    def speed_up(self) -> float | None:
        """How many times sooner the split has answered all, by the medians."""
        one_piece, split = spread(self.one_piece.total_s), spread(self.split.total_s)
        return one_piece.p50 / split.p50 if one_piece and split else None

    def record(self) -> dict[str, Any]:
        """Without the answers: what was asked and said stays here."""
        ways = {
            name: {key: value for key, value in asdict(way).items() if key != "answers"}
            for name, way in (("one_piece", self.one_piece), ("split", self.split))
        }
        plain = {key: value for key, value in vars(self).items() if key not in ways}
        return {**plain, **ways, "equal_answers": self.equal_answers, "speed_up": self.speed_up}


def measure_baseline(
    engine: Engine, text: str, questions: Sequence[str], params: GenerationParams, *, runs: int,
    tell: Callable[[str], None] = lambda _text: None,
) -> Baseline:  # fmt: skip
    """
    Raises:
        BaselineFailed: a question could not be answered one way or the other.
    """
    tell("Loading the model")
    model, prefix = engine.model, engine.prompter.prefix_ids(text)
    one_piece, split = Way(), Way()
    _one_piece(engine, prefix, questions[:1], params, Way())  # warm: kernels are built, pages are there
    for run in range(runs):
        tell(f"In one piece, run {run + 1} of {runs}")
        _one_piece(engine, prefix, questions, params, one_piece)
    for run in range(runs):
        tell(f"Split, run {run + 1} of {runs}")
        _split(engine, text, questions, params, split)
    return Baseline(
        model=engine.name,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        document_tokens=len(prefix),
        questions=len(questions),
        output_tokens=params.max_new_tokens,
        runs=runs,
        one_piece=one_piece,
        split=split,
    )


def _one_piece(engine: Engine, prefix: list[int], questions: Sequence[str], params: GenerationParams, way: Way) -> None:
    """Every question with the whole document before it, one after the other, nothing kept between them."""
    began = time.perf_counter()
    read_s, firsts, answers = 0.0, [], []
    for number, question in enumerate(questions):
        ids = [*prefix, *engine.prompter.question_ids(question)]
        stops = chunk_stops(len(ids) - 1, engine.prompter.head_tokens, engine.settings.chunk_tokens)
        asked = time.perf_counter()
        done = prefill(engine.model, ids[:-1], stops=stops)
        request = DecodeRequest(number, ids[-1:], params, done.kv)
        result = next(iter(Decoder(engine.model, engine.prompter, max_batch=1).run([request])))
        if result.error is not None:
            raise BaselineFailed(str(result.error))
        read_s += done.prefill_s
        firsts.append(time.perf_counter() - asked - result.total_s + result.first_token_s)
        answers.append(result.text)
    way.total_s.append(time.perf_counter() - began)
    way.prefill_s.append(read_s)
    way.first_token_s.append(_median(firsts))
    way.memory_mb = _memory_mb()
    way.answers = answers


def _split(engine: Engine, text: str, questions: Sequence[str], params: GenerationParams, way: Way) -> None:
    """As workers do it: rows, snapshot into the store, load with every byte verified, all questions in one batch."""
    with workbench(engine) as place:
        job_id, document_id = ask(place, text, questions, params)
        began = time.perf_counter()
        row = read(place, document_id)
        if row is not None:
            answer_waiting(place, row)
        total_s = time.perf_counter() - began
        found = answers_of(place, job_id)
        if len(found) < len(questions):
            raise BaselineFailed(first_error(place, job_id) or "an answer is missing")
        reading = reading_of(place, job_id)
    way.total_s.append(total_s)
    way.prefill_s.append(reading.prefill_s)
    way.first_token_s.append(_median([answer.first_token_s for answer in found]))
    way.memory_mb = _memory_mb()
    way.answers = [answer.text for answer in found]


def _median(values: list[float]) -> float:
    found = spread(values)
    return found.p50 if found else 0.0


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
