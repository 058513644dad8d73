from types import SimpleNamespace
from typing import Any

import pytest
from celery.concurrency import get_implementation

from tasks import worker
from tasks.queues import Duty, Pool, Tiers


@pytest.mark.parametrize("pool", Pool)
def test_a_worker_never_forks_what_has_touched_a_device(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA or MUSA context does not survive a fork, and the model is loaded before the pool starts."""
    given: list[str] = []
    app: Any = SimpleNamespace(worker_main=given.extend)
    settings = SimpleNamespace(metrics_port=0)
    place: Any = SimpleNamespace(
        worker_name="host:1", settings=settings, duty=Duty(pool), stop=lambda: None, close=lambda: None
    )
    quiet = SimpleNamespace(start=lambda: None, stop=lambda: None)
    for name in ("Upkeep", "Registration"):
        monkeypatch.setattr(worker, name, lambda *_: quiet)

    worker.serve(app, place, log_level="INFO")

    options = dict(option.removeprefix("--").split("=") for option in given if "=" in option)
    assert get_implementation(options["pool"]).__module__ == "celery.concurrency.thread"
    assert options["concurrency"] == "1"


def test_every_duty_takes_its_own_queues_and_fast_ones_first() -> None:
    assert Duty().queues == ("decode.fast", "prefill.fast", "prefill.batch", "decode.batch")
    assert Duty(Pool.DECODE).queues == ("decode.fast", "decode.batch")
    assert Duty(Pool.PREFILL, Tiers.FAST).queues == ("prefill.fast",)
    assert Duty(Pool.ALL, Tiers.BATCH).queues == ("prefill.batch", "decode.batch")
