import threading
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
    place: Any = SimpleNamespace(worker_name="host:1", stopping=threading.Event(), close=lambda: None)
    quiet = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(worker, "Upkeep", lambda *_: quiet)

    worker.serve(app, place, pool, log_level="INFO")

    options = dict(option.removeprefix("--").split("=") for option in given if "=" in option)
    assert get_implementation(options["pool"]).__module__ == "celery.concurrency.thread"
    assert options["concurrency"] == "1"
