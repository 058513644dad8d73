"""`prefill`: snapshots before the questions come."""

from rich.console import Console

from pipeline.commands.opening import kick, opened
from pipeline.commands.options import Files, Json, ReadingOptions, Title, taking
from pipeline.commands.submit import tell_submission


@taking(ReadingOptions)
def prefill(reading: ReadingOptions, *, files: Files, title: Title = "prefill", json_output: Json = False) -> None:
    """Have the workers read documents now, so that later questions find their snapshots; print the job's id."""
    from kernels.params import GenerationParams
    from kernels.settings import KernelSettings
    from pipeline import submit as submission
    from pipeline.screen import counting
    from pipeline.settings import PipelineSettings
    from storage.settings import StorageSettings

    kernel = KernelSettings()
    submission.refuse_unsupported_model(kernel)
    sources = submission.named_sources(files, PipelineSettings(), StorageSettings())
    screen = Console(stderr=True)
    with opened() as (database, store, settings), counting(screen, "Reading files", len(sources)) as tick:
        made = submission.submit(
            database,
            store,
            settings=settings,
            model=kernel.model_name,
            files=sources,
            questions=[],
            options=GenerationParams(),
            reading=reading.read_options(),
            title=title,
            only_prefill=True,
            on_read=tick,
        )
        kick(database)
    tell_submission(made, json_output=json_output)
