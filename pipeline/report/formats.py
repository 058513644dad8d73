"""The formats of reports, by the endings of files."""

from enum import StrEnum
from pathlib import Path

from pipeline.errors import UnknownFormat


class Format(StrEnum):
    XLSX = "xlsx"
    HTML = "html"
    CSV = "csv"
    JSONL = "jsonl"
    MD = "md"


def format_of(path: Path) -> Format:
    """
    Raises:
        UnknownFormat: no report has this ending.
    """
    ending = path.suffix.lower().removeprefix(".")
    ending = {"htm": "html", "markdown": "md", "ndjson": "jsonl"}.get(ending, ending)
    if ending not in [*Format]:
        raise UnknownFormat(path, [f".{known}" for known in Format])
    return Format(ending)


def out_files(out: Path) -> list[Path]:
    """Where `--out` puts a run's report: in this file, or, for a folder, in one file of each common format.

    Raises:
        UnknownFormat: it has an ending that no report has.
    """
    if out.suffix and not out.is_dir():
        format_of(out)
        return [out]
    return [out / f"answers.{known}" for known in (Format.XLSX, Format.HTML, Format.CSV, Format.JSONL)]
