"""Lines of the output, in OpenAI's format."""

import time
from typing import Any

from kernels.decode import DecodeResult
from kernels.errors import ContextExceeded, KernelError
from kernels.prompt import Prompter
from kernels.sampling import TokenLogprobs
from pipeline.batch.line import BodyRefused, LineRefused


def refused_line(key: str, refused: LineRefused) -> dict[str, Any]:
    error = {"code": refused.code, "message": refused.message}
    return {"id": f"batch_req_{key}", "custom_id": refused.custom_id, "response": None, "error": error}


def refused_body(key: str, custom_id: str, line: int, refused: BodyRefused) -> dict[str, Any]:
    error = {
        "message": f"Line {line}: {refused.message}",
        "type": "invalid_request_error",
        "param": refused.param,
        "code": refused.code,
    }
    return _responded(key, custom_id, 400, {"error": error})


def failed(key: str, custom_id: str, line: int, error: KernelError) -> dict[str, Any]:
    """Of a request that was taken and could not be answered."""
    if isinstance(error, ContextExceeded):
        refused = BodyRefused(str(error), param="messages", code="context_length_exceeded")
        return refused_body(key, custom_id, line, refused)
    told = {"message": f"Line {line}: {error}", "type": "server_error", "param": None, "code": None}
    return _responded(key, custom_id, 500, {"error": told})


def answered(
    key: str, custom_id: str, result: DecodeResult, prompter: Prompter, *, model: str, prompt: int, cached: int
) -> dict[str, Any]:
    """`prompt` tokens, of which `cached` were not computed for this line."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": result.text, "refusal": None},
        "logprobs": None if result.logprobs is None else _logprobs(prompter, result.logprobs),
        "finish_reason": result.finish,
    }
    body = {
        "id": f"chatcmpl-{key}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": len(result.token_ids),
            "total_tokens": prompt + len(result.token_ids),
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }
    return _responded(key, custom_id, 200, body)


def is_answer(record: dict[str, Any]) -> bool:
    response = record["response"]
    return response is not None and response["status_code"] == 200


def _responded(key: str, custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{key}", "body": body}
    return {"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": None}


def _logprobs(prompter: Prompter, tokens: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = prompter.text([token_id])
        whole = "\ufffd" not in text  # else a part of a character, whose bytes the text does not tell
        return {"token": text, "logprob": round(logprob, 6), "bytes": list(text.encode()) if whole else None}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*each) for each in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}
