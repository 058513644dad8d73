"""From an answer's words to a value of the question's type, in English and Chinese forms.

Nothing is guessed: an answer that holds no value of its type, or two different ones, is `unparsed` and stays text.
"""

import json
import re
import unicodedata
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

from pipeline.playbooks.answer_types import AnswerType
from pipeline.playbooks.dates import find_dates
from pipeline.playbooks.money import read_money

_NOT_FOUND = re.compile(
    r"""^\W*(?:
        (?:the\ answer\ is\ |it\ is\ |this\ is\ )?
        not\ (?:found|stated|specified|mentioned|provided|addressed|applicable|available|given|disclosed)\b
      | n/a\W*$ | none\W*$ | unknown\W*$
      | no\ (?:mention|information|such\ (?:clause|provision|information))\b
      | (?:the\ |this\ )?(?:document|agreement|contract|text)\ (?:does\ not|doesn't|doesn’t)\ (?:\w+ly\ )?
        (?:say|state|specify|mention|address|(?:provide|contain)\ (?:any\ |that\ )?information)\b
      | (?:本?(?:文件|合同|协议|文档)(?:中|里)?)?
        (?:未找到|未提及|未约定|未载明|未写明|未说明|未规定|未作约定|没有提及|没有约定|没有说明|没有写明|没有规定|没有找到
          |无相关(?:约定|信息|规定)|不适用)
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_PAUSE = r"(?=\s*(?:[.,;:!?。，；：！？、)）\"'”’*—–]|-\s|\n|$))"
_LEAD = r"^\W*(?:(?:the\ )?answer\ is\W+|答案是\W*|答[：:]\s*)?"
_YES = re.compile(rf"{_LEAD}(?:(?:yes|true){_PAUSE}|(?:是的|是|有|对|可以|允许|需要){_PAUSE})", re.IGNORECASE)
_NO = re.compile(
    rf"{_LEAD}(?:(?:no|false){_PAUSE}(?!\.\s?\d)|(?:否|不|不是|没有|无|不对){_PAUSE}|不(?:可以|允许|需要|能|得))",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"(?:\b(?:not|no|never|non|nor|neither|isn't|isn’t)[\s-]+(?:an?\s+|the\s+)?|[不非未无])$", re.IGNORECASE
)
_BULLET = re.compile(r"^\s*(?:[-*•·–]\s+|\(?\d{1,3}[.)、]\s*|（\d{1,3}）\s*|[一二三四五六七八九十]{1,3}、)")
_FENCE = re.compile(r"^\s*```\w*\s*\n(.*?)\n?\s*```\s*$", re.DOTALL)


class ValueStatus(StrEnum):
    PARSED = "parsed"
    UNPARSED = "unparsed"
    NOT_FOUND = "not_found"


class TypedValue(NamedTuple):
    """`value` is JSON: text for text, choice and date (ISO 8601), bool for yes_no, {"amount": decimal text,
    "currency": ISO 4217 code or null} for money, a list of text for list, anything for json; null unless parsed."""

    status: ValueStatus
    value: Any = None


_NOT_FOUND_WORDS = ("not found", "未找到")  # what the prompt asks for
UNPARSED = TypedValue(ValueStatus.UNPARSED)


def read_value(answer: str, answer_type: AnswerType, choices: tuple[str, ...] = ()) -> TypedValue:
    """The value of an answer. Never raises: answers are a model's words."""
    text = answer.strip()
    if _plain(text) in _NOT_FOUND_WORDS:
        return TypedValue(ValueStatus.NOT_FOUND)
    chosen = _choice(text, choices) if answer_type == AnswerType.CHOICE else UNPARSED
    if chosen.status == ValueStatus.PARSED:
        return chosen  # one of the choices may itself say that something is not mentioned
    if not text:
        return UNPARSED
    if says_not_found(text):
        return TypedValue(ValueStatus.NOT_FOUND)
    match answer_type:
        case AnswerType.TEXT:
            return _parsed(text)
        case AnswerType.YES_NO:
            yes, no = _YES.match(text), _NO.match(text)
            return UNPARSED if bool(yes) == bool(no) else _parsed(yes is not None)
        case AnswerType.DATE:
            dates = find_dates(text)
            return _parsed(dates.pop().isoformat()) if len(dates) == 1 else UNPARSED
        case AnswerType.MONEY:
            money = read_money(text)
            return _parsed(money.record()) if money else UNPARSED
        case AnswerType.LIST:
            return _list(text)
        case AnswerType.JSON:
            return _json(text)
    return UNPARSED


def says_not_found(answer: str) -> bool:
    """Whether the answer says that the document does not say."""
    return _NOT_FOUND.match(answer) is not None


def _parsed(value: Any) -> TypedValue:
    return TypedValue(ValueStatus.PARSED, value)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .,;:!?\"'“”‘’*`。，；：、()")


def _choice(text: str, choices: tuple[str, ...]) -> TypedValue:
    plain = _plain(text)
    for choice in choices:
        if _plain(choice) == plain:
            return _parsed(choice)
    # Longest first, each taken out of the text, so that "exclusive" is not seen in "non-exclusive".
    found = []
    for choice in sorted(choices, key=len, reverse=True):
        pattern = re.escape(_plain(choice))
        if not pattern:
            continue
        match = re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", plain)
        if match is None:
            continue
        if _NEGATION.search(plain[: match.start()]):
            return UNPARSED
        found.append(choice)
        plain = re.sub(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", "\n", plain)
    return _parsed(found[0]) if len(found) == 1 else UNPARSED


def _list(text: str) -> TypedValue:
    whole = _json(text)
    if isinstance(whole.value, list) and all(isinstance(item, str) for item in whole.value):
        return _parsed(whole.value)
    lines = [line for line in text.splitlines() if line.strip()]
    # Commas stand inside names and figures, so they part nothing.
    parts = lines if len(lines) > 1 else re.split(r"[;；、]\s*", lines[0])
    items = [_BULLET.sub("", part).strip() for part in parts]
    return _parsed([item for item in items if item])


def _json(text: str) -> TypedValue:
    fenced = _FENCE.match(text)
    try:
        return _parsed(json.loads(fenced.group(1) if fenced else text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return UNPARSED


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity are not JSON
