"""How answers are generated. Imports no torch, so that a submit host can say it."""

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from kernels.errors import ParamsRefused

MOST_LOGPROBS = 20


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class GenerationParams:
    """How one answer is generated.

    temperature 0 is greedy: the likeliest token that is allowed, whatever top_k, top_p, min_p and seed say.
    top_k 0, top_p 1 and min_p 0 cut nothing; repetition_penalty 1 changes nothing.

    Until `min_new_tokens` are there, the tokens that end an answer cannot be chosen and a stop text does not count.
    `ignore_eos` makes the model's own ends part of the answer; `stop_token_ids` still end it.
    `logprobs`: how many likeliest tokens are reported at each place of the answer, besides the chosen one's own
    logarithm of probability, from the model's scores as they are. None: nothing is reported.

    At most one of `choices` (texts), `regex` (of the whole answer) and `json_schema` (JSON text) constrains the answer,
    which then ends by itself when it is complete; `max_new_tokens` can cut it before.

    `quote`: behind the answer, the model is asked for the words of the document that show it; see kernels.quote.

    Raises:
        pydantic.ValidationError: a number is out of its range, or two things do not go together.
    """

    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    seed: int = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    regex: str | None = None
    json_schema: str | None = None
    quote: bool = False

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """
        Raises:
            ParamsRefused: with one sentence that names the field.
        """
        try:
            return cls(**values)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False, include_context=False)[0]
            field = f"{first['loc'][0]}: " if first["loc"] else ""
            raise ParamsRefused(field + first["msg"].removeprefix("Value error, ")) from exc

    @property
    def is_constrained(self) -> bool:
        return bool(self.choices) or self.regex is not None or self.json_schema is not None

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than the {self.max_new_tokens} of max_new_tokens"
            )
        if sum((bool(self.choices), self.regex is not None, self.json_schema is not None)) > 1:
            raise ValueError("only one of choices, regex and json_schema can hold for an answer")
        if self.is_constrained and (self.stop or self.stop_token_ids):
            raise ValueError(
                "an answer of choices, regex or json_schema ends by itself; leave out stop and stop_token_ids"
            )
        return self
