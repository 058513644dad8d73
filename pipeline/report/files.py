"""CSV and JSONL files of a report."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from pipeline.report.rows import ReportLine


def write_csv(lines: Iterable[ReportLine], file: IO[str]) -> None:
    """One line per row under a line of column names; empty cells where there is nothing to say."""
    writer = None
    for line in lines:
        record = line.record()
        if writer is None:
            writer = csv.DictWriter(file, fieldnames=list(record), lineterminator="\n")
            writer.writeheader()
        writer.writerow(record)


def write_jsonl(lines: Iterable[ReportLine], file: IO[str]) -> None:
    for line in lines:
        file.write(json.dumps(line.json_record(), ensure_ascii=False) + "\n")


def write_files(lines: list[ReportLine], folder: Path) -> tuple[Path, Path]:
    """Writes answers.csv and answers.jsonl; each appears whole, or the old one stays."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / "answers.csv", folder / "answers.jsonl")
    for path, write in zip(paths, (write_csv, write_jsonl), strict=True):
        fresh = path.with_name(f".{path.name}.new")
        # The mark at the start makes spreadsheet programs read the CSV as UTF-8.
        encoding = "utf-8-sig" if path.suffix == ".csv" else "utf-8"
        with fresh.open("w", encoding=encoding, newline="") as file:
            write(lines, file)
        fresh.replace(path)
    return paths
