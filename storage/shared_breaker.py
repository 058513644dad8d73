"""Circuit breakers in rows, for what all processes see alike, as the prefill pool. storage/breaker.py has the rule.

Every change is one statement or under the row's lock, so of all processes one opens it and one probes.
"""

from datetime import datetime, timedelta

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from storage.breaker import BreakerRule, BreakerState
from storage.inserting import insert_new
from storage.schema import BreakerRow

PREFILL = "prefill"


def breaker_state(session: Session, name: str, rule: BreakerRule, now: datetime) -> BreakerState:
    opened_at = session.scalar(select(BreakerRow.opened_at).where(BreakerRow.name == name))
    if opened_at is None:
        return BreakerState.CLOSED
    return BreakerState.HALF_OPEN if opened_at <= _cooled(rule, now) else BreakerState.OPEN


def take_probe(session: Session, name: str, rule: BreakerRule, *, now: datetime, probe_s: float) -> bool:
    """Whether the caller is the one that tries. A probe of which nothing is heard is anybody's again after
    `probe_s`."""
    taken = session.scalar(
        update(BreakerRow)
        .where(
            BreakerRow.name == name,
            BreakerRow.opened_at <= _cooled(rule, now),
            or_(BreakerRow.probing_until.is_(None), BreakerRow.probing_until < now),
        )
        .values(probing_until=now + timedelta(seconds=probe_s))
        .returning(BreakerRow.name)
        .execution_options(synchronize_session=False)
    )
    return taken is not None


def note_success(session: Session, name: str) -> bool:
    """True: it was open, and is closed now."""
    was_open = session.scalar(
        select(BreakerRow.opened_at).where(BreakerRow.name == name, BreakerRow.failures > 0).with_for_update()
    )
    session.execute(
        update(BreakerRow)
        .where(BreakerRow.name == name, BreakerRow.failures > 0)
        .values(failures=0, failing_since=None, opened_at=None, probing_until=None)
        .execution_options(synchronize_session=False)
    )
    return was_open is not None


def note_failure(session: Session, name: str, rule: BreakerRule, now: datetime) -> bool:
    """True: this one opened it."""
    insert_new(session, BreakerRow, [{"name": name, "failures": 0}])
    row = session.scalars(select(BreakerRow).where(BreakerRow.name == name).with_for_update()).one()
    if row.opened_at is not None:
        if row.probing_until is not None:
            row.opened_at, row.probing_until = now, None
        return False
    if row.failing_since is None or row.failing_since < now - timedelta(seconds=rule.window_s):
        row.failures, row.failing_since = 0, now
    row.failures += 1
    if row.failures >= rule.failures:
        row.opened_at = now
    return row.opened_at is not None


def breaker_states(session: Session, rule: BreakerRule, now: datetime) -> dict[str, BreakerState]:
    """Of all that ever failed, and of the prefill pool in any case."""
    names = {PREFILL, *session.scalars(select(BreakerRow.name))}
    return {name: breaker_state(session, name, rule, now) for name in sorted(names)}


def _cooled(rule: BreakerRule, now: datetime) -> datetime:
    return now - timedelta(seconds=rule.cool_down_s)
