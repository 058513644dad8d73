import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import SecretStr, ValidationError
from rich.console import Console

from pipeline import flower
from pipeline.flower import FlowerNotInstalled, describe, serve_flower
from pipeline.settings import PipelineSettings
from tasks.settings import TaskSettings

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_task_shows_ids_and_numbers_where_its_result_would_be() -> None:
    task = SimpleNamespace(document_id="ab" * 32, tokens=12345, snapshot="hit", batch=14, result="None")

    assert describe(task).result == "document abababababab, 12,345 tokens, hit, 14 questions"
    assert describe(SimpleNamespace(document_id=None, tokens=None, snapshot=None, batch=None)).result == ""


def test_a_password_is_made_and_shown_where_none_is_set() -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=200)

    first, second = (flower._login(PipelineSettings(), console) for _ in range(2))

    assert first != second and len(first.partition(":")[2]) >= 16
    assert first.partition(":")[2] in shown.getvalue()


def test_a_password_that_is_set_is_used_and_not_shown() -> None:
    shown = io.StringIO()

    login = flower._login(PipelineSettings(flower_auth=SecretStr("me:swordfish")), Console(file=shown))

    assert login == "me:swordfish" and shown.getvalue() == ""


@pytest.mark.parametrize("auth", ["swordfish", ":swordfish", "me:"])
def test_half_a_login_is_refused_without_showing_it(auth: str) -> None:
    with pytest.raises(ValidationError, match="PLATEMAKER_FLOWER_AUTH: must be user:password") as caught:
        PipelineSettings(flower_auth=SecretStr(auth))

    assert "swordfish" not in str(caught.value)


def test_where_flower_is_missing_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(FlowerNotInstalled, match=r"pip install 'platemaker\[flower\]'"):
        serve_flower(TaskSettings(), PipelineSettings(), Console())


def test_what_only_watches_loads_no_model_library() -> None:
    modules = "pipeline.flower, pipeline.cluster_checks, pipeline.stack.screen, tasks.row_metrics, tasks.health"
    script = f"import sys, {modules}; print('torch' in sys.modules)"

    told = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    assert told.stdout == "False\n"
