"""`prefill`: snapshots before the questions come."""

from pipeline.commands.options import Files, Json, ReadingOptions, TierOption, Title, taking
from pipeline.commands.submit import hand_over
from storage.tiers import Tier


@taking(ReadingOptions)
def prefill(
    reading: ReadingOptions,
    *,
    files: Files,
    title: Title = "prefill",
    tier: TierOption = Tier.BATCH,
    json_output: Json = False,
) -> None:
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
        tier=tier,
        only_prefill=True,
    )
