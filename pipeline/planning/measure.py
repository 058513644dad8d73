"""The rates of this machine with one model, measured for a plan in about a minute."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from kernels.decode import Decoder, DecodeRequest
from kernels.kv import PrefixKV
from kernels.params import GenerationParams
from kernels.prefill import prefill
from pipeline.errors import PlanError
from pipeline.insight.workbench import ask, first_error, read, workbench
from pipeline.planning.profiles import Device
from tasks.decode import answer_waiting
from tasks.engine import Engine

SHORT_TOKENS = 256
LONG_TOKENS = 2048
STEPS = 8
REPEATS = 3
WORDS = "The parties agree that this section shall apply to each notice given under it. "
QUESTION = "What is agreed?"


def measure_device(engine: Engine, name: str, tell: Callable[[str], None] = lambda _text: None) -> Device:
    """Reads a short and a long text, and answers one question and a full batch behind each.

    Raises:
        PlanError: the model's context is too short for two lengths.
    """
    long = min(LONG_TOKENS, engine.context_len - 256)
    if long < 2 * SHORT_TOKENS:
        raise PlanError(f"the model's context of {engine.context_len:,} tokens is too short to measure")
    tell("Loading the model")
    _read(engine, SHORT_TOKENS)  # warm
    tell(f"Reading {SHORT_TOKENS:,} and {long:,} tokens")
    short, short_s = _read(engine, SHORT_TOKENS)
    whole, long_s = _read(engine, long)
    # a·n + b·n² through both points; b may not be negative, and then a is that of the long text
    square = max(0.0, (long_s / long - short_s / SHORT_TOKENS) / (long - SHORT_TOKENS))
    linear = long_s / long - square * long
    batch = engine.settings.max_batch
    tell(f"Answering 1 and {batch} questions behind both")
    steps = {
        (rows, prefix.length): _step_s(engine, rows, prefix) for prefix in (short, whole) for rows in sorted({1, batch})
    }
    per_step, per_row, per_token, both = _plane(steps, batch, long)
    tell("Timing what a document and an answer take besides the model")
    document_s, answer_s = _overheads(engine)
    return Device(
        name=name,
        origin="measured",
        prefill_s_per_token=linear,
        prefill_s_per_token2=square,
        step_s=per_step,
        step_s_per_row=per_row,
        step_s_per_token=per_token,
        step_s_per_row_token=both,
        kv_bytes_per_token=engine.model.prefix_bytes(1),
        document_overhead_s=document_s,
        answer_overhead_s=answer_s,
    )


def profile_lines(device: Device) -> str:
    """The device as an entry of a profiles file."""
    skipped = {"name", "origin", "price_per_hour"}
    values = [f"{key} = {value!r}" for key, value in asdict(device).items() if key not in skipped]
    return "\n".join([f'[devices."{device.name}".measured]', *values, ""])


def write_profile(device: Device, path: Path) -> None:
    path.write_text(profile_lines(device), encoding="utf-8")


def _plane(steps: dict[tuple[int, int], float], batch: int, long: int) -> tuple[float, float, float, float]:
    """What a step takes as a + b·rows + c·tokens + d·rows·tokens, through the measured points; none is negative."""

    def line(at: int) -> tuple[float, float]:
        one = steps[1, at]
        slope = max(0.0, (steps[batch, at] - one) / (batch - 1)) if batch > 1 else 0.0
        return max(0.0, one - slope), slope

    (base_short, slope_short), (base_long, slope_long) = line(SHORT_TOKENS), line(long)
    span = long - SHORT_TOKENS
    per_token = max(0.0, (base_long - base_short) / span)
    both = max(0.0, (slope_long - slope_short) / span)
    return max(0.0, base_long - per_token * long), max(0.0, slope_long - both * long), per_token, both


def _ids(engine: Engine, tokens: int) -> list[int]:
    return engine.prompter.prefix_ids(WORDS * (tokens // 8 + 1))[:tokens]


def _read(engine: Engine, tokens: int) -> tuple[PrefixKV, float]:
    done = [prefill(engine.model, _ids(engine, tokens), stops=engine.chunk_stops(tokens)) for _ in range(REPEATS)]
    return done[-1].kv, median(each.prefill_s for each in done)


def _step_s(engine: Engine, rows: int, prefix: PrefixKV) -> float:
    """Seconds of one step, once all have their first token."""
    params = GenerationParams(max_new_tokens=STEPS + 1, ignore_eos=True)
    ids = engine.prompter.question_ids(QUESTION)
    times = []
    for _ in range(REPEATS):
        decoder = Decoder(engine.model, engine.prompter, max_batch=rows)
        results = list(decoder.run([DecodeRequest(row, ids, params, prefix) for row in range(rows)]))
        times.append(min(result.total_s - result.first_token_s for result in results) / STEPS)
    return median(times)


def _overheads(engine: Engine) -> tuple[float, float]:
    """Seconds that a document and that an answer take beside the model: rows, store, checks. Documents are as short as
    they can be, so that nearly nothing else is in them."""
    params = GenerationParams(max_new_tokens=1, ignore_eos=True)
    documents, answers = [], []
    batch = engine.settings.max_batch
    with workbench(engine) as place:
        for number in range(REPEATS + 1):  # the first pays for what is done once in a process
            took = {}
            for count in (1, batch):
                text = f"Notice {number} of {count}."
                job_id, document_id = ask(place, text, [f"{QUESTION} {at}" for at in range(count)], params)
                began = time.perf_counter()
                row = read(place, document_id)
                if row is None:
                    raise PlanError(f"the model could not read a short text ({first_error(place, job_id)})")
                was_read = time.perf_counter()
                answer_waiting(place, row)
                took[count] = time.perf_counter() - was_read
                documents.append(was_read - began - (row.prefill_s or 0.0))
            answers.append(max(0.0, took[batch] - took[1]) / max(1, batch - 1))
    kv, _ = _read(engine, 64)
    ids = engine.prompter.question_ids(f"{QUESTION} 0")
    began = time.perf_counter()
    one = [DecodeRequest(at, ids, params, kv) for at in range(batch)]
    list(Decoder(engine.model, engine.prompter, max_batch=batch).run(one))
    model_s = (time.perf_counter() - began) / batch
    return median(documents[2:]), max(0.0, median(answers[1:]) - model_s)
