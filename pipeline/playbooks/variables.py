"""Variables of playbooks: `{party}` in a question, its title, guidance and choices; `{{party}}` stays as `{party}`."""

import re
from collections.abc import Mapping
from typing import Any

FIELDS = ("question", "title", "guidance", "choices")
NAME = re.compile(r"[^\W\d]\w*")
_VARIABLE = re.compile(r"\{(\{[^\W\d]\w*\})\}|\{([^\W\d]\w*)\}")


def fill(value: Any, values: Mapping[str, str], *, used: set[str]) -> tuple[Any, list[str]]:
    """The entry with its variables filled in, and the names that have no value. Adds to `used` those that have one."""
    missing: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        if match[2] in values:
            used.add(match[2])
            return values[match[2]]
        missing.append(match[2])
        return match[0]

    def filled(part: Any) -> Any:
        if isinstance(part, list):
            return [filled(item) for item in part]
        return _VARIABLE.sub(replaced, part) if isinstance(part, str) else part

    if isinstance(value, dict):
        value = {name: filled(part) if name in FIELDS else part for name, part in value.items()}
    else:
        value = filled(value) if isinstance(value, str) else value
    return value, list(dict.fromkeys(missing))
