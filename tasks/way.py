"""Which way a document's questions go: the split, one piece by choice, or one piece because the split cannot be had.

Chosen when a message is sent, by whoever sends it, and again by the decode worker that it reaches, so that what has
changed meanwhile counts, and no message says more than whose document it is.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import sha256

from sqlalchemy.orm import Session

from storage.break_even import SHORT_TOKENS
from storage.breaker import BreakerState
from storage.noted_ways import note_choices
from storage.rates import DocumentRates, document_rates
from storage.shared_breaker import PREFILL, breaker_state, take_probe
from storage.tiers import Stage
from storage.way_facts import WaitingFacts, long_sent, waiting_facts
from storage.ways import AS_MODE_SAYS, Choice, DocumentKey, Mode, Way, Why
from storage.workers import live_workers
from tasks.queues import DECODE_QUEUES, PREFILL_QUEUES
from tasks.registry import alive_since
from tasks.settings import TaskSettings


@dataclass(frozen=True)
class Pools:
    """What is seen of the workers. `trouble`: why the prefill pool cannot be used; None: it can. `decoders`: live
    workers that answer, without which there is nobody to fall back on. Inside one process both pools are the process
    itself: None of `decoders` are counted and nothing falls back."""

    trouble: Why | None
    decoders: int
    may_probe: bool = False


def look_at_pools(session: Session, settings: TaskSettings, now: datetime) -> Pools:
    if settings.broker_url is None:
        return Pools(None, 0)
    workers = live_workers(session, seen_after=alive_since(now, settings.lease_s))
    decoders = [row for row in workers if DECODE_QUEUES.intersection(row.queues)]
    if not any(PREFILL_QUEUES.intersection(row.queues) for row in workers):
        # Pools that start together get the time of two leases to see each other.
        is_settled = any(row.started_at <= alive_since(now, settings.lease_s) for row in decoders)
        return Pools(Why.NO_PREFILL_POOL if is_settled else None, len(decoders))
    state = breaker_state(session, PREFILL, settings.breaker_rule, now)
    trouble = None if state == BreakerState.CLOSED else Why.PREFILL_BREAKER
    return Pools(trouble, len(decoders), may_probe=state == BreakerState.HALF_OPEN)


def wanted_mode(facts: WaitingFacts, settings: TaskSettings) -> Mode:
    """Jobs that wait for one document go one way: split where one of them asks for it, else in one piece where one
    does."""
    modes = {settings.mode if mode is None else Mode(mode) for mode in facts.modes}
    return next(mode for mode in (Mode.SPLIT, Mode.MONOLITHIC, Mode.AUTO) if mode in modes)


def choose(
    key: DocumentKey,
    facts: WaitingFacts,
    pools: Pools,
    rates: DocumentRates | None,
    settings: TaskSettings,
    now: datetime,
) -> Choice:
    mode = wanted_mode(facts, settings)
    if mode == Mode.SPLIT or facts.wants_snapshot:
        return AS_MODE_SAYS
    is_canary = in_canary(key.document_id, settings.canary_percent) and pools.trouble is None
    if mode == Mode.MONOLITHIC:
        is_own = Mode.MONOLITHIC in facts.modes  # a job that asks for it is no canary
        return Choice(Way.SPLIT, Why.CANARY) if is_canary and not is_own else Choice(Way.ONE_PIECE, Why.MODE)
    trouble = pools.trouble
    if trouble is None and not facts.is_ready and is_overdue(facts, settings, now):
        trouble = Why.PREFILL_OVERLOADED
    if trouble is not None and pools.decoders:
        return Choice(Way.FALLBACK, trouble)
    if facts.is_ready:
        return Choice(Way.SPLIT, Why.READY)
    if rates is None:
        return Choice(Way.SPLIT, Why.UNMEASURED)
    tokens = facts.num_chars * rates.tokens_per_char
    if tokens < SHORT_TOKENS and facts.questions < (rates.split.break_even(tokens) or 1):
        return Choice(Way.SPLIT, Why.CANARY) if is_canary else Choice(Way.ONE_PIECE, Why.SHORT)
    return Choice(Way.SPLIT, Why.PAYS)


def is_overdue(facts: WaitingFacts, settings: TaskSettings, now: datetime) -> bool:
    """It waits longer than the overload limit, and was not sent just now: what is tried again comes from old jobs."""
    waited_long = facts.since < now - timedelta(seconds=settings.overload_age_s)
    return waited_long and facts.kicked_at is not None and facts.kicked_at < _a_lease_ago(settings, now)


def in_canary(document_id: str, percent: float) -> bool:
    """The same documents at all times and in all processes."""
    return int(sha256(document_id.encode()).hexdigest()[:8], 16) % 10_000 < percent * 100


def choose_ways(
    session: Session,
    keys: Collection[DocumentKey],
    settings: TaskSettings,
    now: datetime,
    *,
    is_store_away: bool = False,
) -> dict[DocumentKey, Choice]:
    """Chooses for each of the documents that wait for something, and notes it. Where the prefill pool's breaker asks
    for a probe, one of them is it. `is_store_away`: from the caller, who would answer, the store cannot be reached."""
    found = waiting_facts(session, keys, now)
    pools = look_at_pools(session, settings, now)
    if is_store_away:
        pools = replace(pools, trouble=Why.STORE_BREAKER, decoders=max(1, pools.decoders))
    rates = document_rates(session) if found else None
    choices: dict[DocumentKey, Choice] = {}
    for key, facts in found.items():
        choice = choose(key, facts, pools, rates, settings, now)
        if choice == (Way.FALLBACK, Why.PREFILL_BREAKER) and pools.may_probe and not _probes(choices):
            probe_s = 2 * settings.lease_s
            if take_probe(session, PREFILL, settings.breaker_rule, now=now, probe_s=probe_s):
                choice = Choice(Way.SPLIT, Why.PROBE)
        choices[key] = choice
    note_choices(session, {key: choice for key, choice in choices.items() if found[key].noted != choice})
    return choices


def choose_fallbacks(
    session: Session, settings: TaskSettings, now: datetime, *, limit: int
) -> dict[DocumentKey, Choice]:
    """Documents that were sent to a prefill pool which does not come to them, and are now to be sent another way, or
    once more as a probe. Noted."""
    pools = look_at_pools(session, settings, now)
    if not pools.decoders:
        return {}
    keys = long_sent(session, kicked_before=_a_lease_ago(settings, now), now=now, limit=limit)
    choices = choose_ways(session, keys, settings, now) if keys else {}
    return {key: choice for key, choice in choices.items() if choice.way != Way.SPLIT or choice.why == Why.PROBE}


def stage_of(choice: Choice) -> Stage:
    """What is to be done first."""
    return Stage.READ if choice.way == Way.SPLIT else Stage.WHOLE


def is_for_one_piece(session: Session, key: DocumentKey, settings: TaskSettings, now: datetime) -> bool:
    """Whether a document that waits to be read is to be answered in one piece by choice: it can be taken up before
    anybody has chosen."""
    facts = waiting_facts(session, [key], now).get(key)
    if facts is None:
        return False
    return choose(key, facts, Pools(None, 0), document_rates(session), settings, now).way == Way.ONE_PIECE


def _probes(choices: dict[DocumentKey, Choice]) -> bool:
    return any(choice.why == Why.PROBE for choice in choices.values())


def _a_lease_ago(settings: TaskSettings, now: datetime) -> datetime:
    return now - timedelta(seconds=settings.lease_s)
