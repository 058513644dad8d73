"""The files of a schedule, where they lie: a folder of this machine, or a bucket."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pipeline.errors import ScheduleError
from storage.objects.s3_inbox import S3Inbox
from storage.settings import StorageSettings

SUFFIXES = {".pdf", ".docx", ".txt", ".text", ".md"}


def is_visible(source: str, questions: str) -> bool:
    """Whether this machine can read them; a bucket can be read from everywhere."""
    return Path(questions).is_file() and (source.startswith("s3://") or Path(source).is_dir())


@contextmanager
def files_of(source: str, settings: StorageSettings) -> "Iterator[dict[Path, str]]":
    """The documents of a source by their paths, with the names that reports show, as long as the block runs.

    Raises:
        ScheduleError: there is no such folder here, or no document in it.
        ObjectStoreError: the bucket cannot be read.
    """
    if source.startswith("s3://"):
        with tempfile.TemporaryDirectory(prefix="platemaker-") as folder, closing(S3Inbox(settings, source)) as inbox:
            found = {}
            for number, name in enumerate(name for name in inbox.names() if Path(name).suffix.lower() in SUFFIXES):
                path = Path(folder) / f"{number}{Path(name).suffix.lower()}"
                inbox.download(name, path)
                found[path] = inbox.url(name)
            yield _some(found, source)
    else:
        folder_path = Path(source)
        if not folder_path.is_dir():
            raise ScheduleError(f"{source} is not a folder of this machine; run it where the files lie")
        paths = sorted(path for path in folder_path.rglob("*") if path.is_file() and path.suffix.lower() in SUFFIXES)
        yield _some({path: str(path) for path in paths}, source)


def _some(found: dict[Path, str], source: str) -> dict[Path, str]:
    if not found:
        raise ScheduleError(f"there is no document in {source}; put PDF, DOCX or text files there")
    return found
