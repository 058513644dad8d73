"""The KV of prompt tokens that several requests begin with, from a snapshot of its own."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from kernels.kv import PrefixKV
from kernels.prefill import prefill
from kernels.prompt import ids_digest
from storage.database import utc_now
from storage.snapshots import get_snapshot, quarantine
from tasks.errors import PromptChanged
from tasks.loading import DAMAGED, leased, loaded
from tasks.prefill import snapshot_of
from tasks.room import require_room_to_read
from tasks.workplace import Workplace

logger = logging.getLogger(__name__)


class SharedPrefix(NamedTuple):
    """`computed_tokens`: how many were computed for it now; 0 where the snapshot was there."""

    kv: PrefixKV
    computed_tokens: int


@contextmanager
def shared_prefix(place: Workplace, tenant: str, ids: list[int]) -> Iterator[SharedPrefix]:
    """The KV of `ids`, loaded and proved, or computed and stored; its document is named by its tokens. Held by a lease
    inside the block.

    Raises:
        KernelError: it cannot be computed.
    """
    with ExitStack() as stack:
        found = _from_snapshot(place, tenant, ids, stack) or _from_snapshot(place, tenant, ids, stack)
        if found is None:  # another process writes it, or it cannot be stored
            found = SharedPrefix(computed_prefix(place, ids), len(ids))
        yield found


def computed_prefix(place: Workplace, ids: list[int]) -> PrefixKV:
    """Computed and kept nowhere.

    Raises:
        KernelError: it cannot be computed.
    """
    require_room_to_read(place, len(ids))
    return prefill(place.engine.model, ids, stops=place.engine.chunk_stops(len(ids))).kv


def _from_snapshot(place: Workplace, tenant: str, ids: list[int], leave: ExitStack) -> SharedPrefix | None:
    """None: it cannot be had, or is damaged and now out of use."""
    began = utc_now()
    snapshot_id = snapshot_of(place, tenant, ids_digest(ids), ids, for_jobs=False)
    if snapshot_id is None:
        return None
    with place.database.reading() as session:
        row = get_snapshot(session, snapshot_id)
    owner = place.new_owner()
    with ExitStack() as stack:
        stack.enter_context(place.heartbeat.holding(owner))
        if not stack.enter_context(leased(place, snapshot_id, owner)):
            return None
        try:
            prefix = stack.enter_context(loaded(place, row, ids))
            prefix.prove()
        except (*DAMAGED, PromptChanged) as exc:
            logger.warning("snapshot is damaged", extra={"snapshot_id": snapshot_id, "reason": type(exc).__name__})
            with place.database.writing() as session:
                quarantine(session, snapshot_id, str(exc))
            return None
        leave.push(stack.pop_all())
    is_new = row.ready_at is not None and row.ready_at >= began
    return SharedPrefix(prefix.kv, row.computed_tokens if is_new else 0)
