"""When a schedule is due: cron lines in local time."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from pipeline.errors import ScheduleError


@dataclass(frozen=True)
class Occurrence:
    """`name` is the local time on the wall, so what a change of clocks repeats is one; `due_at` is aware UTC."""

    name: str
    due_at: datetime


def time_zone(name: str) -> ZoneInfo:
    """
    Raises:
        ScheduleError: there is none of this name.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise ScheduleError(f"{name} is no time zone; write one like Asia/Shanghai or Europe/Berlin") from exc


def last_due(line: str, zone: ZoneInfo, now: datetime) -> Occurrence | None:
    """The newest occurrence that is due at `now`. A local time that a change of clocks leaves out is due as much later
    as the clock jumped; one that it repeats, at the first of the two.

    Raises:
        ScheduleError: the line is no cron line.
    """
    wall = now.astimezone(zone).replace(tzinfo=None, second=0, microsecond=0)
    for found in _walk(line, wall + timedelta(minutes=1), reverse=True):
        occurrence = _occurrence(found, zone)
        if occurrence.due_at <= now:
            return occurrence
    return None


def next_due(line: str, zone: ZoneInfo, now: datetime) -> Occurrence | None:
    """The first occurrence that is not yet due at `now`. Raises as `last_due`."""
    wall = now.astimezone(zone).replace(tzinfo=None, second=0, microsecond=0)
    for found in _walk(line, wall - timedelta(minutes=1), reverse=False):
        occurrence = _occurrence(found, zone)
        if occurrence.due_at > now:
            return occurrence
    return None


def _occurrence(wall: datetime, zone: ZoneInfo) -> Occurrence:
    return Occurrence(wall.isoformat(timespec="minutes"), wall.replace(tzinfo=zone).astimezone(UTC))


def _walk(line: str, start: datetime, *, reverse: bool) -> Iterator[datetime]:
    try:
        yield from CronSim(line, start, reverse=reverse)
    except CronSimError as exc:
        reason = f"{line} is no cron line of minute, hour, day, month and weekday; 0 1 * * * is each night at one"
        raise ScheduleError(reason) from exc
