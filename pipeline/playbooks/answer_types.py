"""What kind of answer a question asks for."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class AnswerType(StrEnum):
    TEXT = "text"
    YES_NO = "yes_no"
    DATE = "date"
    MONEY = "money"
    CHOICE = "choice"
    LIST = "list"
    JSON = "json"


@dataclass(frozen=True)
class AnswerSpec:
    """What a report needs to know of a question besides its text; kept with the job's question.

    `question` is the question as a person wrote it, where what the model is asked (see `prompt`) says more.
    """

    type: AnswerType = AnswerType.TEXT
    choices: tuple[str, ...] = ()
    quote: bool = False
    question: str | None = None
    template: str | None = None

    def record(self) -> dict[str, Any]:
        """As JSON, without what says nothing; empty for a plain question."""
        return {name: value for name, value in asdict(self).items() if value != getattr(_PLAIN, name)}

    @classmethod
    def of(cls, record: dict[str, Any]) -> "AnswerSpec":
        """The spec of `record`. Fields of later versions are left out."""
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        known["type"] = AnswerType(known.get("type", AnswerType.TEXT))
        known["choices"] = tuple(known.get("choices", ()))
        return cls(**known)


_PLAIN = AnswerSpec()
