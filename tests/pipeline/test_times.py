from datetime import UTC, datetime, timedelta

import pytest

from pipeline.errors import TimeUnclear
from pipeline.times import parse_duration, parse_when

NOW = datetime(2026, 11, 3, 21, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("90m", 5400), ("6h", 21600), ("1h30m", 5400), ("2d", 172800), ("0.5h", 1800)]
)
def test_a_duration_is_from_now_on(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_when(text, NOW) == NOW + timedelta(seconds=seconds)


def test_a_time_with_a_zone_is_that_moment() -> None:
    assert parse_when("2026-12-01T06:00+08:00", NOW) == datetime(2026, 11, 30, 22, tzinfo=UTC)


def test_a_time_without_a_zone_is_this_machine_s() -> None:
    assert parse_when("2026-12-01T06:00", NOW) == datetime(2026, 12, 1, 6).astimezone()


@pytest.mark.parametrize("text", ["", "tomorrow", "6", "-6h", "6 h", "2026-13-01", "h6"])
def test_what_is_neither_is_told(text: str) -> None:
    with pytest.raises(TimeUnclear, match="is no time"):
        parse_when(text, NOW)
