"""The whole product in a fresh process: `platemaker run` without a screen, for scripts/bench.

With the document's snapshot in the data folder (PLATEMAKER_DATA_DIR) it reads nothing and answers from the store.
One line of JSON, with the clock at the end.
"""

import argparse
import io
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.documents import ReadOptions, Split
from pipeline.questions import load_questions
from pipeline.run import run_here
from pipeline.settings import PipelineSettings
from storage.jobs import JobTimes
from storage.settings import StorageSettings
from tasks.settings import TaskSettings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--document", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--new-tokens", type=int)
    arguments = parser.parse_args()
    storage = StorageSettings()
    finished = run_here(
        storage=storage,
        kernel=KernelSettings(),
        task=TaskSettings().model_copy(update={"broker_url": None}),
        settings=PipelineSettings(),
        files=[str(arguments.document)],
        questions=load_questions([arguments.questions], []),
        options=GenerationParams(max_new_tokens=arguments.new_tokens, ignore_eos=True),
        reading=ReadOptions(),
        split=Split.REFUSE,
        title="",
        client_key=None,
        times=JobTimes(),
        out=storage.data_dir / "review",
        console=Console(file=io.StringIO()),
    )
    print(json.dumps({"ended": time.time(), **finished.summary.record()}), flush=True)


if __name__ == "__main__":
    main()
