"""One line of a batch file, checked: what is asked, or what is wrong with it, as OpenAI says it.

A line that is no request has an `error`; a request that cannot be served has a response with status 400.
"""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kernels.errors import ConstraintRefused, ParamsRefused
from kernels.grammar import grammar_of
from kernels.params import MOST_LOGPROBS, GenerationParams

URL = "/v1/chat/completions"
ANY_OBJECT = '{"type": "object"}'


class LineRefused(Exception):
    """The line is no request of a batch."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


class BodyRefused(Exception):
    """The request cannot be served; `param` names what is wrong in its body."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class BatchRequest:
    custom_id: str
    messages: tuple[Message, ...]
    params: GenerationParams


def parse_line(data: bytes, line: int) -> tuple[str, dict[str, Any]]:
    """The custom_id and the body of line number `line`.

    Raises:
        LineRefused
    """
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as exc:
        raise LineRefused("invalid_json_line", f"Line {line} is not valid JSON.") from exc
    if not isinstance(value, dict):
        raise LineRefused("invalid_request", f"Line {line} is not a JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineRefused("missing_required_parameter", f"Line {line} has no custom_id; give each line its own text.")
    if value.get("method") != "POST":
        raise LineRefused("invalid_method", f"Line {line}: method must be POST.", custom_id)
    if value.get("url") != URL:
        raise LineRefused("invalid_url", f"Line {line}: url must be {URL}.", custom_id)
    if not isinstance(value.get("body"), dict):
        raise LineRefused("missing_required_parameter", f"Line {line} has no body.", custom_id)
    return custom_id, value["body"]


def parse_body(custom_id: str, body: dict[str, Any], *, max_tokens: int) -> BatchRequest:
    """
    Raises:
        BodyRefused
    """
    for name in ("tools", "functions"):
        if body.get(name):
            raise BodyRefused(f"{name} cannot be called here; leave them out.", param=name)
    if body.get("n") not in (None, 1):
        raise BodyRefused("n must be 1; write one line for each answer.", param="n")
    try:
        checked = _Body.model_validate({name: value for name, value in body.items() if name not in _WITHOUT_EFFECT})
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        what = "is not known here; leave it out" if first["type"] == "extra_forbidden" else first["msg"]
        raise BodyRefused(f"{param}: {what}.", param=param) from exc
    messages = tuple(Message(_ROLES[one.role], _text(one.content)) for one in checked.messages)
    if any(re.search("[\ud800-\udfff]", message.content) for message in messages):
        raise BodyRefused("messages hold half a character (a lone surrogate).", param="messages")
    if all(message.role == "system" for message in messages):
        raise BodyRefused("messages need one that is not of the system.", param="messages")
    return BatchRequest(custom_id, messages, _params(checked, max_tokens))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    name: str | None = None
    refusal: None = None


class _Schema(_Strict):
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


class _Format(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _Body(_Strict):
    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_listed), Field(max_length=4)] | None = None
    response_format: _Format | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    stream: Literal[False] | None = None


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_WITHOUT_EFFECT = frozenset(
    {"n", "tools", "functions", "tool_choice", "function_call", "parallel_tool_calls", "user", "metadata", "store"}
    | {"service_tier", "safety_identifier", "prompt_cache_key", "reasoning_effort"}
)
_LEAST_TOP_P = 1e-6  # 0 stands for the likeliest token alone


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _params(body: _Body, max_tokens: int) -> GenerationParams:
    schema = None
    if body.response_format is not None and body.response_format.type == "json_object":
        schema = ANY_OBJECT
    elif body.response_format is not None and body.response_format.type == "json_schema":
        if body.response_format.json_schema is None:
            raise BodyRefused("response_format of type json_schema needs a json_schema.", param="response_format")
        schema = json.dumps(body.response_format.json_schema.schema_, ensure_ascii=False)
    if body.top_logprobs is not None and not body.logprobs:
        raise BodyRefused("top_logprobs needs logprobs to be true.", param="top_logprobs")
    try:
        params = GenerationParams.checked(
            max_new_tokens=body.max_completion_tokens or body.max_tokens or max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else max(body.top_p, _LEAST_TOP_P),
            seed=body.seed or 0,
            stop=tuple(body.stop or ()),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            json_schema=schema,
        )
        if schema is not None:
            grammar_of(params)
    except (ParamsRefused, ConstraintRefused) as exc:
        param = "response_format" if schema is not None else None
        raise BodyRefused(str(exc), param=param) from exc
    return params
