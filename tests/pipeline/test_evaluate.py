import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.documents import Split
from pipeline.errors import EvaluationFileError
from pipeline.evaluate import evaluate, intersection_over_union
from pipeline.nli_file import read_gold
from pipeline.playbooks.answer_types import AnswerType
from pipeline.questions import Question
from pipeline.settings import PipelineSettings
from storage.database import Database
from storage.progress import job_status
from storage.settings import StorageSettings
from tasks.settings import TaskSettings
from tests.short_model import shortened

TEXT = "1.  The Receiving Party shall keep it.\r\n\r\n2. 乙方应保密。 It may not share it.\n"
SPANS = [[0, 38], [42, 51], [52, 71]]


def gold_file(folder: Path) -> Path:
    gold = {
        "a": {"choice": "Entailment", "spans": [0]},
        "b": {"choice": "Contradiction", "spans": [1, 2]},
        "c": {"choice": "NotMentioned", "spans": []},
    }
    text = TEXT + "3. The parties agree on nothing else.\n" * 30
    document: dict[str, Any] = {"file_name": "x.pdf", "text": text, "spans": SPANS}
    document["annotation_sets"] = [{"annotations": gold}]
    path = folder / "gold.json"
    path.write_text(json.dumps({"documents": [document] * 3}))
    return path


@pytest.mark.parametrize("split", [*Split])
def test_every_quote_that_is_measured_is_verbatim(split: Split, tiny_model: Path, tmp_path: Path) -> None:
    if split == Split.SECTIONS:
        tiny_model = shortened(tiny_model, tmp_path)
    asked = [Question(name, name, f"Does it say {name}?", answer_type=AnswerType.YES_NO) for name in "abcd"]

    measured = evaluate(
        read_gold(gold_file(tmp_path), 2),
        storage=StorageSettings(data_dir=tmp_path / "data"),
        kernel=KernelSettings(model=str(tiny_model)),
        task=TaskSettings(),
        settings=PipelineSettings(),
        questions=asked,
        options=GenerationParams(max_new_tokens=8, quote=True),
        split=split,
        console=Console(quiet=True),
    )

    with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database, database.reading() as session:
        assert job_status(session, "default", measured["job_id"]).split == (split == Split.SECTIONS)
    assert (measured["documents"], measured["answers"], measured["failed"]) == (2, 6, 0)  # d has no gold
    assert (measured["with_evidence"], measured["without_evidence"]) == (4, 2)
    assert measured["verbatim_quotes"] in (1.0, None)
    assert (measured["verbatim_quotes"] is None) == (measured["quotes"] == 0)


def test_overlap_is_that_of_sets() -> None:
    for _ in range(100):
        spans = [sorted(random.sample(range(60), 2)) for _ in range(4)]
        left, right = [(a, b) for a, b in spans[:2]], [(a, b) for a, b in spans[2:]]
        overlap = intersection_over_union(left, right)
        assert overlap == intersection_over_union(right, left)
        assert 0 <= overlap <= 1
        assert intersection_over_union(left, left) == 1
    assert intersection_over_union([(0, 4)], [(2, 6)]) == 2 / 6
    assert intersection_over_union([], [(2, 6)]) == 0


@pytest.mark.parametrize("content", [b"", b"[]", b'{"documents": [{}]}', b"\xff", b'{"documents": {}}'])
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "gold.json"
    path.write_bytes(content)

    with pytest.raises(EvaluationFileError):
        read_gold(path, None)
    with pytest.raises(EvaluationFileError):
        read_gold(tmp_path / "none.json", None)
