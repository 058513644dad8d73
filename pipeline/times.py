"""Times as people write them."""

import re
from datetime import UTC, datetime, timedelta

from pipeline.errors import TimeUnclear

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def parse_duration(text: str) -> float:
    """Seconds of `90m`, `6h` or `1h30m`.

    Raises:
        TimeUnclear: it is none.
    """
    if not _DURATION.fullmatch(text):
        raise TimeUnclear(text)
    return sum(float(count) * _SECONDS[unit] for count, unit in _PART.findall(text))


def parse_when(text: str, now: datetime) -> datetime:
    """Aware UTC of a duration from `now` on, or of an ISO time; one without a zone is of this machine's.

    Raises:
        TimeUnclear: it is neither.
    """
    if _DURATION.fullmatch(text):
        return now + timedelta(seconds=parse_duration(text))
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise TimeUnclear(text) from exc


def parse_since(text: str, now: datetime) -> datetime:
    """Aware UTC of a duration back from `now`, or of an ISO time.

    Raises:
        TimeUnclear: it is neither.
    """
    if _DURATION.fullmatch(text):
        return now - timedelta(seconds=parse_duration(text))
    return parse_when(text, now)
