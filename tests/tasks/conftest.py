from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.documents import Split
from pipeline.questions import Question
from pipeline.settings import PipelineSettings
from pipeline.splitting import splitter
from pipeline.submit import Submission, submit
from storage.settings import StorageSettings
from tasks.settings import TaskSettings
from tasks.workplace import Workplace
from tests.storage.conftest import database as database
from tests.storage.conftest import server as server

TEXT = "".join(f"Article {n}. The Supplier shall deliver part {n * 37 % 101} within {n} days.\n" for n in range(1, 25))


@pytest.fixture
def open_place(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Workplace]]:
    """Opens workplaces of one folder store and one SQLite database; each stands for a process of its own, which
    keeps nothing in memory unless told to."""
    opened: list[Workplace] = []

    def opener(**task: Any) -> Workplace:
        place = Workplace.open(
            StorageSettings(data_dir=tmp_path / "data"),
            KernelSettings(model=str(tiny_model), chunk_tokens=256, max_batch=4),
            TaskSettings(**{"lease_s": 30.0, "memory_cache_mb": 0, **task}),
        )
        place.database.upgrade()
        opened.append(place)
        return place

    yield opener
    for place in opened:
        place.close()
        place.store.close()


@pytest.fixture
def place(open_place: Callable[..., Workplace]) -> Workplace:
    return open_place()


@pytest.fixture
def submit_texts(tmp_path: Path) -> Callable[..., Submission]:
    """Submits texts as files with a number of questions, and options of the job or of generation."""

    def submitter(place: Workplace, *texts: str, questions: int = 3, **options: Any) -> Submission:
        of_job = ("reuse_answers", "only_prefill", "tier", "mode")
        job = {name: options.pop(name) for name in of_job if name in options}
        settings = PipelineSettings(tenant=options.pop("tenant", "default"))
        split = options.pop("split", Split.REFUSE)
        asked = [Question(f"q{n}", f"Question {n}", f"What does article {n} say?") for n in range(questions)]
        params = GenerationParams(**{"max_new_tokens": 8, **options})
        files = []
        for number, text in enumerate(texts):
            path = tmp_path / f"contract-{number}.txt"
            path.write_text(text)
            files.append(path)
        return submit(
            place.database,
            place.store,
            settings=settings,
            model=place.engine.name,
            files=files,
            questions=asked,
            options=params,
            splitter=splitter(split, place.engine.settings, asked, params),
            **job,
        )

    return submitter
