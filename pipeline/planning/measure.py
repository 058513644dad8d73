"""The rates of this machine with one model, measured for a plan in about a minute with a worker's own tasks."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count, product
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.errors import PlanError
from pipeline.insight.workbench import answers_of, ask, first_error, read, workbench_on
from pipeline.planning.profiles import Device
from storage.settings import StorageSettings
from tasks.decode import answer_waiting
from tasks.engine import Engine
from tasks.workplace import Workplace

SHORT_TOKENS = 256
LONG_TOKENS = 2048
OUTPUT_TOKENS = 16
REPEATS = 3
LEAVE_S = 60.0  # a sample on a slow machine
WORDS = "The parties agree that this section shall apply to each notice given under it. "
QUESTION = "What is agreed?"


class Sample(NamedTuple):
    """Seconds of one document of `tokens` with `rows` questions: reading it, with the model and beside it; one step of
    its answers; and what answering takes that is no step: loading, rows, the questions' own tokens."""

    rows: int
    tokens: int
    prefill_s: float
    around_prefill_s: float
    step_s: float
    around_steps_s: float


def measure_device(
    engine: Engine,
    storage: StorageSettings,
    name: str,
    tell: Callable[[str], None] = lambda _text: None,
    *,
    at_once: int = 1,
) -> Device:
    """Reads short and long documents and answers half a batch and a whole one about each, as a worker does, with rows
    and checks, in a corner of the configured store. Sums count, so rates are means. `at_once`: so many processes do
    the same at the same time, as on a machine that several workers share, with each other and with the store's server.

    Raises:
        PlanError: the model's context is too short for two lengths, or it could not read or answer.
        StorageError: the store cannot be used.
    """
    lengths = _lengths(engine)
    counts = _counts(engine)
    samples: list[Sample] = []
    with workbench_on(storage, engine) as place, busy_beside(engine.settings, storage, at_once - 1, tell):
        tell("Loading the model")
        for at, tokens in enumerate(lengths):  # pays for what is done once in a process
            _sample(place, f"{at}", tokens, counts[-1])
        for tokens in lengths:
            for rows in counts:
                times = "once" if rows == 1 else f"{rows} times at once"
                tell(f"Reading {tokens:,} tokens and answering {times}")
                samples += [_sample(place, f"{tokens} {rows} {at}", tokens, rows) for at in range(REPEATS)]
    question_tokens = len(engine.prompter.question_ids(f"{QUESTION} 0"))
    return rates(samples, name, question_tokens=question_tokens, kv_bytes_per_token=engine.model.prefix_bytes(1))


@contextmanager
def busy_beside(
    kernel: KernelSettings, storage: StorageSettings, processes: int, tell: Callable[[str], None]
) -> Iterator[None]:
    """So many processes read and answer meanwhile; what they take is not counted.

    Raises:
        PlanError: one of them could not begin, or ended too soon.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    others = []
    try:
        for _ in range(processes):
            tell("Starting a process that works beside this one")
            here, there = context.Pipe(duplex=False)
            other = context.Process(target=_be_busy, args=(kernel, storage, there, stop), daemon=True)
            other.start()
            others.append(other)
            there.close()  # so that the end of the process is the end of the pipe
            with here:
                try:
                    problem = here.recv()
                except EOFError:
                    problem = "it was ended"
            if problem is not None:
                raise PlanError(f"a process that was to work beside this one did not begin: {problem.rstrip('.')}")
        yield
        if not all(other.is_alive() for other in others):
            raise PlanError("a process that worked beside this one has ended, so nothing was measured; measure again")
    finally:
        stop.set()
        for other in others:
            other.join(LEAVE_S)
            other.terminate()
            other.join()


def _be_busy(kernel: KernelSettings, storage: StorageSettings, begun: Connection, stop: Event) -> None:
    """Says None once it is under way, or why it is not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the keyboard: the process that measures decides
    engine, parent = Engine(kernel), multiprocessing.parent_process()
    try:
        with workbench_on(storage, engine) as place:
            _sample(place, "first", SHORT_TOKENS, 1)
            begun.send(None)
            for at in count():
                for tokens, rows in product(_lengths(engine), _counts(engine)):
                    if stop.is_set() or (parent is not None and not parent.is_alive()):
                        return
                    _sample(place, f"{at} {rows}", tokens, rows)
    except Exception as exc:
        with suppress(OSError):  # nobody listens any more: that it ended is enough
            begun.send(str(exc) or type(exc).__name__)


def _lengths(engine: Engine) -> tuple[int, int]:
    long = min(LONG_TOKENS, engine.context_len - 256)
    if long < 2 * SHORT_TOKENS:
        raise PlanError(f"the model's context of {engine.context_len:,} tokens is too short to measure")
    return SHORT_TOKENS, long


def _counts(engine: Engine) -> list[int]:
    batch = engine.settings.max_batch
    return sorted({max(1, batch // 2), batch})  # of a few questions the answers would be guessed ahead


def rates(samples: Iterable[Sample], name: str, *, question_tokens: int, kv_bytes_per_token: int) -> Device:
    """Of samples with two lengths, and one number of rows or two."""
    samples = list(samples)
    means = {
        at: Sample(*(mean(values) for values in zip(*(each for each in samples if each[:2] == at), strict=True)))
        for at in {each[:2] for each in samples}
    }
    short, long = sorted({tokens for _, tokens in means})
    few, many = min(rows for rows, _ in means), max(rows for rows, _ in means)
    # a·n + b·n² through both points; b may not be negative, and then a is that of the long text
    short_s, long_s = (mean(each.prefill_s for each in means.values() if each.tokens == at) for at in (short, long))
    square = max(0.0, (long_s / long - short_s / short) / (long - short))
    linear = long_s / long - square * long

    def of_rows(figure: Callable[[Sample], float], tokens: int, known: float = 0.0) -> tuple[float, float]:
        """What it takes whatever the rows, and for each of them, `known` where all samples have as many rows."""
        least, most = figure(means[few, tokens]), figure(means[many, tokens])
        slope = max(0.0, (most - least) / (many - few)) if many > few else known
        return max(0.0, most - slope * many), slope

    step_short, step_long = (of_rows(lambda each: each.step_s, at) for at in (short, long))
    per_token, both = (
        max(0.0, (ahead - back) / (long - short)) for back, ahead in zip(step_short, step_long, strict=True)
    )
    own = [question_tokens * (linear + 2 * square * at) for at in (short, long)]
    around = [of_rows(lambda each: each.around_steps_s, *at) for at in zip((short, long), own, strict=True)]
    load = max(0.0, (around[1][0] - around[0][0]) / (long - short))
    # A plan has the overhead of a document twice: where it is read, and where it is answered.
    twice = mean(each.around_prefill_s for each in means.values()) + max(0.0, around[1][0] - load * long)
    return Device(
        name=name,
        origin="measured",
        prefill_s_per_token=linear,
        prefill_s_per_token2=square,
        step_s=max(0.0, step_long[0] - per_token * long),
        step_s_per_row=max(0.0, step_long[1] - both * long),
        step_s_per_token=per_token,
        step_s_per_row_token=both,
        kv_bytes_per_token=kv_bytes_per_token,
        load_s_per_token=load,
        document_overhead_s=twice / 2,
        answer_overhead_s=max(0.0, mean(slope for _, slope in around) - mean(own)),
    )


def _sample(place: Workplace, name: str, tokens: int, rows: int) -> Sample:
    params = GenerationParams(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True)
    questions = [f"{QUESTION} {at}" for at in range(rows)]
    job_id, document_id = ask(place, text_of(place.engine, name, tokens), questions, params)
    began = time.perf_counter()
    row = read(place, document_id)
    was_read = time.perf_counter()
    if row is not None:
        answer_waiting(place, row)
    ended = time.perf_counter()
    answers = answers_of(place, job_id)
    if row is None or row.prefill_s is None or len(answers) < rows:
        raise PlanError(f"the model could not read and answer a short text ({first_error(place, job_id)})")
    step_s = mean((each.total_s - each.first_token_s) / (each.output_tokens - 1) for each in answers)
    return Sample(
        rows, tokens, row.prefill_s, was_read - began - row.prefill_s, step_s, ended - was_read - OUTPUT_TOKENS * step_s
    )


def text_of(engine: Engine, name: str, tokens: int) -> str:
    """Of about so many tokens, template and all. Its name is where it begins: it shares no chunk with others."""
    begin = f"Notice {name}. "
    none, ten = (len(engine.prompter.prefix_ids(begin + WORDS * count)) for count in (0, 10))
    return begin + WORDS * max(1, round(10 * (tokens - none) / (ten - none)))


def profile_lines(device: Device) -> str:
    """The device as an entry of a profiles file."""
    skipped = {"name", "origin", "price_per_hour"}
    values = [f"{key} = {value!r}" for key, value in asdict(device).items() if key not in skipped]
    return "\n".join([f'[devices."{device.name}".measured]', *values, ""])


def write_profile(device: Device, path: Path) -> None:
    path.write_text(profile_lines(device), encoding="utf-8")
