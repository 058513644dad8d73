from types import SimpleNamespace
from typing import Any

import pytest
from celery.concurrency import get_implementation

from tasks import worker
from tasks.queues import Pool


@pytest.mark.parametrize("pool", Pool)
def test_a_worker_never_forks_what_has_touched_a_device(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA or MUSA context does not survive a fork, and the model is loaded before the pool starts."""
    given: list[str] = []
    app: Any = SimpleNamespace(worker_main=given.extend)
    settings = SimpleNamespace(metrics_port=0)
    place: Any = SimpleNamespace(worker_name="host:1", settings=settings, stop=lambda: None, close=lambda: None)
    quiet = SimpleNamespace(start=lambda: None, stop=lambda: None)
    for name in ("Upkeep", "Registration"):
        monkeypatch.setattr(worker, name, lambda *_: quiet)

    worker.serve(app, place, pool, log_level="INFO")

    options = dict(option.removeprefix("--").split("=") for option in given if "=" in option)
    assert get_implementation(options["pool"]).__module__ == "celery.concurrency.thread"
    assert options["concurrency"] == "1"
