"""`prefill`: snapshots before the questions come."""

from pipeline.commands.options import Files, Json, ReadingOptions, Title, taking
from pipeline.commands.submit import hand_over


@taking(ReadingOptions)
def prefill(reading: ReadingOptions, *, files: Files, title: Title = "prefill", json_output: Json = False) -> None:
    """Have the workers read documents now, so that later questions find their snapshots; print the job's id."""
    from kernels.params import GenerationParams
    from kernels.settings import KernelSettings

    hand_over(
        KernelSettings(),
        files,
        json_output=json_output,
        questions=[],
        options=GenerationParams(),
        reading=reading.read_options(),
        title=title,
        only_prefill=True,
    )
