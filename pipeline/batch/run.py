"""`platemaker run-batch`: from a batch file to its output, in this process."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kernels.identity import digest_json
from kernels.settings import KernelSettings
from pipeline.batch.answer import BatchRun, Counts
from pipeline.batch.index import BatchIndex, index_file
from pipeline.batch.journal import Journal, open_journal
from pipeline.batch.record import is_answer
from pipeline.guard import check_no_other_kernels
from pipeline.settings import PipelineSettings
from storage.objects import check_store
from storage.settings import StorageSettings
from tasks.settings import TaskSettings
from tasks.workplace import Workplace


@dataclass(frozen=True)
class BatchDone:
    """`failed` lines have no answer. `counts` are of this run alone."""

    lines: int
    failed: int
    counts: Counts


def run_batch(
    file: Path,
    out: Path,
    errors: Path | None,
    *,
    storage: StorageSettings,
    kernel: KernelSettings,
    task: TaskSettings,
    settings: PipelineSettings,
    max_tokens: int,
    on_indexed: Callable[[int], None],
    on_done: Callable[[Counts], None],
) -> BatchDone:
    """Rows of the database are not used, but for the snapshots: the journal beside the output says what is done.

    `on_indexed(lines)` is called once the file was looked through, `on_done` behind each line.

    Raises:
        BatchFileError: the file cannot be read, or another process writes this output.
    """
    check_no_other_kernels()
    place = Workplace.open(storage, kernel, task)
    place.database.upgrade()
    check_store(place.store)
    identity = place.engine.identity
    salt = digest_json([identity.weights, identity.config, identity.adapter, identity.tokenizer, max_tokens])
    try:
        index = index_file(file, salt)
        on_indexed(len(index.lines))
        with open_journal(out) as journal, file.open("rb") as source:
            counts = BatchRun(place, settings.tenant, index, source, journal, max_tokens, on_done).run()
            failed = _write(index, journal, out, errors)
            journal.path.unlink()
    finally:
        place.close()
        place.store.close()
    return BatchDone(len(index.lines), failed, counts)


def _write(index: BatchIndex, journal: Journal, out: Path, errors: Path | None) -> int:
    """In the order of the input, whole or not at all; returns how many lines failed."""
    failed = 0
    with ExitStack() as stack:
        answers = stack.enter_context(_whole(out))
        refusals = answers if errors is None else stack.enter_context(_whole(errors))
        for line in index.lines:
            record = journal.get(line.key)
            failed += not is_answer(record)
            target = answers if is_answer(record) else refusals
            target.write(json.dumps(record, ensure_ascii=False) + "\n")
    return failed


@contextmanager
def _whole(path: Path) -> Iterator[IO[str]]:
    partial = path.with_name(f"{path.name}.partial")
    # Half a character, which JSON can hold, becomes JSON's own escape.
    with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
