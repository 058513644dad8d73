"""`platemaker run`: the whole pipeline in one process, over the same tasks and rows as a cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kernels.model import model_folder
from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.documents import ReadOptions, Split
from pipeline.guard import check_no_other_kernels
from pipeline.questions import Question
from pipeline.report.files import write_reports
from pipeline.report.formats import out_files
from pipeline.report.rows import ReportLine
from pipeline.report.summary import Summary
from pipeline.report.table import first_lines, print_summary, print_table
from pipeline.screen import counting, follow, stage
from pipeline.settings import PipelineSettings
from pipeline.splitting import splitter
from pipeline.submit import named_sources, submit
from storage.database import utc_now
from storage.endings import cancel_job
from storage.errors import OUTAGES
from storage.jobs import JobTimes
from storage.objects import check_store
from storage.settings import StorageSettings
from tasks.app import PlatemakerApp, configure
from tasks.settings import TaskSettings
from tasks.traces import tracing
from tasks.upkeep import kick_waiting
from tasks.worker import embedded
from tasks.workplace import Workplace


@contextmanager
def working(
    storage: StorageSettings, kernel: KernelSettings, task: TaskSettings, console: Console
) -> Iterator[tuple[PlatemakerApp, Workplace]]:
    """A worker on a thread of this process, while the block runs. A missing or unsuitable model, or a store that cannot
    be used, ends it before anything is queued."""
    check_no_other_kernels()
    place = Workplace.open(storage, kernel, task)
    place.database.upgrade()
    check_store(place.store)
    with stage(console, f"Preparing the model {kernel.model_name}"):
        _ = place.engine.identity
    app = configure(task)
    with tracing(task), embedded(app, place):
        yield app, place


@dataclass(frozen=True)
class Finished:
    summary: Summary
    interrupted: bool


def run_here(
    *,
    storage: StorageSettings,
    kernel: KernelSettings,
    task: TaskSettings,
    settings: PipelineSettings,
    files: list[str],
    questions: list[Question],
    options: GenerationParams,
    reading: ReadOptions,
    split: Split,
    title: str,
    client_key: str | None,
    times: JobTimes,
    out: Path,
    console: Console,
) -> Finished:
    """Submits the job, works it off on a thread, shows its progress, writes its report.

    Stopped from the keyboard, it cancels what is left and reports what is there.
    """
    paths = out_files(out)
    paths[0].parent.mkdir(parents=True, exist_ok=True)  # now, and not after a night's work
    with working(storage, kernel, task, console) as (app, place):
        cutting = splitter(split, kernel, questions, options, folder=model_folder(kernel.model))
        with stage(console, "Looking for files"):
            sources = named_sources(files, settings, storage)
        with counting(console, "Reading files", len(sources)) as tick:
            made = submit(
                place.database,
                place.store,
                settings=settings,
                model=place.engine.name,
                files=sources,
                questions=questions,
                options=options,
                reading=reading,
                title=title,
                client_key=client_key,
                times=times,
                limits=storage.limits,
                splitter=cutting,
                on_read=tick,
            )
        for note in made.notes:
            console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
        interrupted = False
        try:
            kick_waiting(app, place.database, task)
            follow(place.database, settings.tenant, made.job_id, console=console, check=place.raise_outage)
        except OUTAGES:
            kept = f"Job {made.job_id} is kept: the next `platemaker run` goes on with it."
            console.print(kept, style="yellow", highlight=False, soft_wrap=True)
            raise
        except KeyboardInterrupt:
            interrupted = True
            place.stop()
            with place.database.writing() as session:
                cancel_job(session, settings.tenant, made.job_id, utc_now())
        shown: list[ReportLine] = []
        summary = write_reports(
            place.database, place.store, settings.tenant, made.job_id, paths, on_line=first_lines(shown)
        )
    print_table(console, shown, rows=summary.rows)
    print_summary(console, summary, tuple(paths))
    return Finished(summary, interrupted)
