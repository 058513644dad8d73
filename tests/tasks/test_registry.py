from collections.abc import Callable
from contextlib import closing

import pytest
from sqlalchemy import select

from kernels.settings import KernelSettings
from storage.schema import WorkerRow
from tasks.engine import Engine
from tasks.errors import OtherModelServed
from tasks.queues import Duty, Pool
from tasks.registry import Registration
from tasks.workplace import Workplace


class Started:
    """A registration that is ended with the block."""

    def __init__(self, place: Workplace, pool: Pool) -> None:
        place.duty = Duty(pool)
        self.inner = Registration(place)

    def start(self) -> None:
        self.inner.start()

    def close(self) -> None:
        self.inner.stop()


def workers(place: Workplace) -> list[tuple[str, str]]:
    with place.database.reading() as session:
        return [(row.worker, row.pool) for row in session.scalars(select(WorkerRow))]


def test_a_worker_is_listed_from_its_start_to_its_end(place: Workplace) -> None:
    with closing(Started(place, Pool.DECODE)) as registration:
        registration.start()
        assert workers(place) == [(place.worker_name, "decode")]

    assert workers(place) == []


def test_another_model_beside_live_workers_is_refused_and_leaves_no_trace(
    open_place: Callable[..., Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_place(), open_place()
    settings = second.engine.settings
    second.engine = Engine(KernelSettings(**{**settings.model_dump(), "system_prompt": "Answer in one word."}))
    with closing(Started(first, Pool.PREFILL)) as registration:
        registration.start()
        monkeypatch.setattr(Workplace, "worker_name", "elsewhere:7")
        with pytest.raises(OtherModelServed) as caught:
            Started(second, Pool.DECODE).start()
        assert len(workers(first)) == 1
        monkeypatch.undo()

    assert str(caught.value).startswith(f"Worker {first.worker_name} is alive and computes with")
    with closing(Started(second, Pool.DECODE)) as registration:  # the other one has gone
        registration.start()


def test_the_digest_stands_for_what_makes_snapshots_interchangeable(place: Workplace) -> None:
    settings = place.engine.settings.model_dump()

    same = Engine(KernelSettings(**{**settings, "max_batch": 7, "threads": 1}))
    others = [
        Engine(KernelSettings(**{**settings, **change}))
        for change in ({"codec": "int8"}, {"dtype": "bfloat16"}, {"system_prompt": "Be brief."})
    ]

    assert same.sha256 == place.engine.sha256
    assert len({place.engine.sha256, *(engine.sha256 for engine in others)}) == 4
