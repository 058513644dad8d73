"""The right answers: of `platemaker run`, one process with a folder and SQLite, in which nothing is disturbed."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from storage.database import Database
from storage.settings import StorageSettings
from storm.checks import Answers, answers


def undisturbed_answers(
    folder: Path, settings: Mapping[str, str], documents: Sequence[Path], questions: Path, max_tokens: int
) -> Answers:
    """
    Raises:
        RuntimeError: it did not answer everything.
    """
    folder.mkdir()
    data = folder / "data"
    command: list[str | Path] = [sys.executable, "-m", "pipeline", "run", *documents, "--questions", questions]
    options: list[str | Path] = [
        "--max-tokens",
        str(max_tokens),
        "--ignore-eos",
        "--out",
        folder / "answers.jsonl",
        "--json",
    ]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, **settings, "PLATEMAKER_DATA_DIR": str(data)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"The undisturbed run ended with status {done.returncode}: {done.stderr[-2000:]}")
    with closing(Database(StorageSettings(data_dir=data))) as database, database.reading() as session:
        return answers(session)
