"""Our side of scripts/bench: one round in a process of its own, one line of JSON."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402 # from here on it is part of the start

from kernels.decode import Decoder, DecodeRequest  # noqa: E402
from kernels.kv import PrefixKV  # noqa: E402
from kernels.model import Asked, LanguageModel, load_model, model_folder  # noqa: E402
from kernels.params import GenerationParams  # noqa: E402
from kernels.prefill import chunk_stops, prefill  # noqa: E402
from kernels.prompt import Prompter  # noqa: E402
from kernels.settings import KernelSettings  # noqa: E402

DOCUMENTS, EACH = 8, 4
QUESTIONS = DOCUMENTS * EACH


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=Path, nargs="+", help="the first is asked, the others are read only")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--counts", type=int, nargs="+")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--repeats", type=int, default=1, help="of each measurement, of which the median is given")
    arguments = parser.parse_args()
    settings = KernelSettings()
    folder = model_folder(settings.model)
    prompter, model = Prompter(folder, settings.system_prompt), load_model(folder, settings)
    found: dict[str, Any] = {
        "start_s": time.perf_counter() - BEGAN,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }
    asked = arguments.questions.read_text("utf-8").splitlines()
    params = GenerationParams(max_new_tokens=arguments.new_tokens, ignore_eos=True)

    def read(path: Path, most: int | None = None) -> tuple[PrefixKV, float]:
        ids = prompter.prefix_ids(path.read_text("utf-8")[:most])
        seconds = []
        for _ in range(arguments.repeats):
            began = time.perf_counter()
            made = prefill(model, ids, stops=chunk_stops(len(ids), prompter.head_tokens, settings.chunk_tokens))
            seconds.append(time.perf_counter() - began)
        return made.kv, statistics.median(seconds)

    read(arguments.documents[0], 2000)
    for path in arguments.documents[1:]:
        other, found[f"prefill_s_{path.stem}"] = read(path)
        found[f"document_tokens_{path.stem}"] = other.length
        del other
    kv, found["prefill_s"] = read(arguments.documents[0])
    found["document_tokens"] = kv.length
    for count in arguments.counts:
        requests = [DecodeRequest(n, prompter.question_ids(asked[n]), params, prefix=kv) for n in range(count)]
        answers = [answer(model, prompter, requests, max_batch=count) for _ in range(arguments.repeats)]
        found[f"decode_s_{count}"] = statistics.median(answers)
    copies = [copied(model, kv) for _ in range(DOCUMENTS)]
    documents = [many_documents(model, prompter, kv, copies, asked, params) for _ in range(arguments.repeats)]
    found["one_document_s"], found["many_documents_s"] = map(statistics.median, zip(*documents, strict=True))
    found["step_s_32"], found["step_s_many"] = step_s(model, [kv]), step_s(model, copies)
    found["prefill_floor_s"], found["step_floor_s_32"], found["step_floor_s_many"] = floors(model, kv)
    print(json.dumps(found))


def answer(model: LanguageModel, prompter: Prompter, requests: list[DecodeRequest], *, max_batch: int) -> float:
    """Seconds until all are answered."""
    began = time.perf_counter()
    results = list(Decoder(model, prompter, max_batch=max_batch).run(requests))
    seconds = time.perf_counter() - began
    expected = sum(request.params.max_new_tokens for request in requests)
    assert sum(len(result.token_ids) for result in results) == expected
    return seconds


def many_documents(
    model: LanguageModel,
    prompter: Prompter,
    kv: PrefixKV,
    copies: list[PrefixKV],
    asked: list[str],
    params: GenerationParams,
) -> tuple[float, float]:
    """Seconds for 32 questions of one document, and for 4 of each of 8, in one batch.

    The 8 are copies of the same document's KV, each in memory of its own: they cost what other documents of its length
    would, and reading them takes no time.
    """
    ids = [prompter.question_ids(question) for question in asked[:QUESTIONS]]
    one = [DecodeRequest(n, tokens, params, prefix=kv) for n, tokens in enumerate(ids)]
    many = [DecodeRequest(n, tokens, params, prefix=copies[n // EACH]) for n, tokens in enumerate(ids)]
    return (
        answer(model, prompter, one, max_batch=len(ids)),
        answer(model, prompter, many, max_batch=len(ids)),
    )


def copied(model: LanguageModel, kv: PrefixKV) -> PrefixKV:
    fresh = model.new_kv(kv.length)
    for layer in kv.token_layers:
        fresh.write(layer, 0, kv.keys[layer][:, : kv.length], kv.values[layer][:, : kv.length])
    fresh.set_state(kv.length, kv.state())
    return fresh


def step_s(model: LanguageModel, documents: list[PrefixKV]) -> float:
    """Median seconds of a step in which 32 answers of some 24 tokens grow by one, as many of each document."""
    each = QUESTIONS // len(documents)
    suffixes = [model.new_suffix(each, 64) for _ in documents]

    def step(pending: list[int], length: int) -> float:
        asked = [Asked(*one, [pending] * each, [length] * each) for one in zip(documents, suffixes, strict=True)]
        began = time.perf_counter()
        model.ask_all(asked)
        return time.perf_counter() - began

    step([1] * 20, 0)
    return statistics.median(step([1], length) for length in range(20, 28))


def floors(model: LanguageModel, kv: PrefixKV) -> tuple[float, float, float]:
    """Seconds of the prefill, and of a step of 32 questions of one document and of many, were all operations as fast as
    this machine's best matrix product of this dtype and all bytes as fast as its best read."""
    weights = sum(part.numel() for part in model.hf.parameters())
    embedding = model.hf.get_input_embeddings().weight.numel()
    config = model.hf.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = 4 * config.num_attention_heads * dim * config.num_hidden_layers
    product, read = best_rates(model.dtype, model.device)
    reading = 2 * (weights - embedding) * kv.length + pairs * kv.length**2 / 2
    step = (2 * weights + pairs * kv.length) * QUESTIONS / product
    one, many = ((weights * model.dtype.itemsize + kv.size_bytes * each) / read for each in (1, DOCUMENTS))
    return reading / product, max(step, one), max(step, many)


def best_rates(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Operations a second, bytes read a second."""
    a, b = (torch.randn(1536, 1536).to(device, dtype) for _ in range(2))
    large = torch.randn(64 << 20, device=device)
    products, reads = [], []
    for _ in range(8):
        products.append(2 * 1536**3 / timed(lambda: a @ b, device))
        reads.append(large.numel() * 4 / timed(large.sum, device))
    return max(products), max(reads)


def timed(work: Any, device: torch.device) -> float:
    torch.get_device_module(device).synchronize()
    began = time.perf_counter()
    work()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
