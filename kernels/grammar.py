"""Which answers a question allows: texts to choose from, a regular expression or a JSON schema, as a grammar.

Imports no torch, so that a submit host can refuse what cannot be enforced.
"""

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits

from kernels.errors import ConstraintRefused
from kernels.params import GenerationParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only in its stubs

# JSON on one line, as json.dumps writes it: nothing is gained where a model may write blanks without end.
JSON_STYLE: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# An automaton grows while it is used, by about 2 kB a state. Errors hold no word of an answer.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def grammar_of(params: GenerationParams) -> str:
    """llguidance's form of the constraint.

    Raises:
        ConstraintRefused: it cannot be enforced, with the reason; also where there is none.
    """
    if params.choices:
        what, grammar = "choices", "start: " + " | ".join(map(_quoted, params.choices))
    elif params.regex is not None:
        what, grammar = "regex", LLMatcher.grammar_from_regex(params.regex)
    elif params.json_schema is not None:
        what, grammar = "json_schema", _schema_grammar(params.json_schema)
    else:
        raise ConstraintRefused("constraint", "there is none")
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_error:
        raise ConstraintRefused(what, reason_of(messages[0]))
    return grammar


def reason_of(message: str) -> str:
    """The part of llguidance's message that says what is wrong, on one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = errors[0] if errors else lines[0].rpartition(" (in regex): ")[2] if lines else "unknown"
    return reason.rstrip(".:").replace("Unimplemented keys", "these keys cannot be enforced")


def _quoted(text: str) -> str:
    """A text as Lark writes it: JSON's escapes are Lark's, which also wants one for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _schema_grammar(text: str) -> str:
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as exc:
        raise ConstraintRefused("json_schema", "it is not JSON") from exc
    if not isinstance(schema, dict):
        raise ConstraintRefused("json_schema", "it is not a JSON object")
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_STYLE)
    except ValueError as exc:
        raise ConstraintRefused("json_schema", reason_of(str(exc))) from exc
