"""A bound on what is queued: a job that would go beyond it is refused."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from storage.errors import QueueFull
from storage.limits import Limits
from storage.schema import JobRow

COUNTING_LOCK = 0x706C7175  # any number that nobody else locks in this database


def require_room(session: Session, tenant: str, num_new: int, limits: Limits) -> None:
    """To be asked last in the transaction that wrote a job of `num_new` open items: until it ends, no other one counts,
    so that jobs submitted at the same time do not go beyond the bound together.

    Raises:
        QueueFull: those are too many; the transaction is not to be committed.
    """
    bounds = _bounds(tenant, limits)
    if not num_new or all(most is None for _, most in bounds):
        return
    if session.get_bind().dialect.name == "postgresql":  # SQLite's transactions exclude each other anyway
        session.execute(select(func.pg_advisory_xact_lock(COUNTING_LOCK)))
    for whose, most in bounds:
        if most is not None and (found := num_queued(session, whose)) > most:
            raise QueueFull(found - num_new, num_new, most, whose)


def refuse_if_full(session: Session, tenant: str, limits: Limits, *, client_key: str | None = None) -> None:
    """Before files are read in vain. A job that is there under the key needs no room.

    Raises:
        QueueFull: the bound is reached already.
    """
    bounds = _bounds(tenant, limits)
    for whose, most in bounds:
        if most is None or (found := num_queued(session, whose)) < most:
            continue
        of_key = select(JobRow.job_id).filter_by(tenant=tenant, client_key=client_key)
        if client_key is None or session.scalar(of_key) is None:
            raise QueueFull(found, 1, most, whose)


def _bounds(tenant: str, limits: Limits) -> list[tuple[str | None, int | None]]:
    return [(None, limits.queued_items), (tenant, limits.of(tenant).queued_items)]


def num_queued(session: Session, tenant: str | None) -> int:
    """Items that wait or run, of a tenant or of all: by the jobs' own counts, so among a million as fast as among
    ten."""
    of_tenant = () if tenant is None else (JobRow.tenant == tenant,)
    query = select(func.coalesce(func.sum(JobRow.num_open), 0)).where(JobRow.finished_at.is_(None), *of_tenant)
    return int(session.scalars(query).one())
