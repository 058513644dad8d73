from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.report.nights import ANSWERS, SCAN, Night


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    made = Night(tmp_path / "data")
    yield made
    made.database.close()


@pytest.fixture
def job_id(night: Night) -> str:
    """Half finished: an answered document, a scan, one with other outcomes, one that waits."""
    other = {
        **ANSWERS,
        "law": "French law",
        "cap": "EUR 1 or USD 2",
        "date": "Not found.",
        "assign": "Perhaps.",
        "parties": None,
        "pay": "未找到",
        "free": "@SUM(A1)\t" * 5000 + "\x07end",
    }
    sources = [
        night.source("in/alpha.pdf"),
        SCAN,
        night.source("in/beta.docx", ("Another contract.\n", "It has two pages.")),
        night.source("w.txt", ("w",)),
    ]
    return night.job(sources, {"in/alpha.pdf": ANSWERS, "in/beta.docx": other})
