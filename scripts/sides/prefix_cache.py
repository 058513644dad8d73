"""transformers as its documentation says: the document once into a DynamicCache, and a copy of it for each question.
One line of JSON; a few questions are measured, and the caller multiplies."""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

BEGAN = time.perf_counter()

import torch  # noqa: E402 # from here on it is part of the start
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--documents", type=Path, nargs="+", help="the first is asked, the others are read only")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--measured", type=int, help="questions")
    parser.add_argument("--new-tokens", type=int)
    arguments = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    model = model.to(device).eval()
    found = {"start_s": time.perf_counter() - BEGAN, "questions_measured": arguments.measured}

    def ids(text: str) -> torch.Tensor:
        return torch.tensor([tokenizer(text, add_special_tokens=False).input_ids], device=device)

    def read(path: Path) -> tuple[DynamicCache, float]:
        cache, tokens = DynamicCache(config=model.config), ids(path.read_text("utf-8") + "\n\n")
        began = time.perf_counter()
        run(tokens, cache)
        return cache, time.perf_counter() - began

    def run(tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The best next token [1, 1]."""
        logits = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    run(ids("A short text to begin with."), DynamicCache(config=model.config))
    for path in arguments.documents[1:]:
        found[f"prefill_s_{path.stem}"] = read(path)[1]
    cache, found["prefill_s"] = read(arguments.documents[0])
    found["document_tokens"] = cache.get_seq_length()
    each = []
    for question in arguments.questions.read_text("utf-8").splitlines()[: arguments.measured]:
        began = time.perf_counter()
        own = copy.deepcopy(cache)
        token = run(ids(question + "\n"), own)
        for _ in range(arguments.new_tokens - 1):
            token = run(token, own)
        token.tolist()
        each.append(time.perf_counter() - began)
    found["question_s"] = statistics.mean(each)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
