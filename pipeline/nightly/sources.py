"""The files of a schedule, where they lie: a folder of this machine, or a bucket."""

from pathlib import Path

from pipeline.documents import Source
from pipeline.errors import EmptyFolder, ScheduleError
from pipeline.playbooks.library import playbook_path
from pipeline.settings import PipelineSettings
from pipeline.submit import named_sources
from storage.settings import StorageSettings


def is_visible(source: str, questions: str) -> bool:
    """Whether this machine can read them; a bucket can be read from everywhere."""
    return playbook_path(Path(questions)).is_file() and (source.startswith("s3://") or Path(source).is_dir())


def sources_of(source: str, settings: PipelineSettings, storage: StorageSettings) -> list[Source]:
    """
    Raises:
        ScheduleError: there is no such folder here, or no file in it.
        ObjectStoreError: the bucket cannot be listed.
    """
    if not source.startswith("s3://") and not Path(source).is_dir():
        raise ScheduleError(f"{source} is not a folder of this machine; run it where the files lie")
    found = named_sources([source], settings, storage)
    if all(isinstance(each.error, EmptyFolder) for each in found):
        raise ScheduleError(f"there is no document in {source}; put files there")
    return found
