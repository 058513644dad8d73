"""Messages for units of work, each to the queue of its stage and tier."""

from celery import Celery

from storage.tiers import Stage
from storage.units import WaitingUnit
from tasks.queues import queue_of


def send_hint(app: Celery, unit: WaitingUnit) -> None:
    """
    Raises:
        OperationalError: the broker does not answer.
    """
    queue = queue_of(unit.stage, unit.tier)
    if unit.stage == Stage.READ:
        app.send_task("platemaker.prefill", args=[unit.tenant, unit.document_id], queue=queue)
    elif unit.stage == Stage.WHOLE:
        app.send_task("platemaker.answer", args=[unit.tenant, unit.document_id], queue=queue)
    elif unit.snapshot_id is not None:
        app.send_task("platemaker.decode", args=[unit.snapshot_id], queue=queue)
