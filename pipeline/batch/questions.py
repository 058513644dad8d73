"""The questions of a batch file: what its lines say behind the beginning that they share with others."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.batch.index import BLOCK_CHARS, groups, index_file
from pipeline.batch.line import BatchRequest, BodyRefused, parse_body, parse_line

_ANY = 1  # tokens; the longest answer is no part of a question


@dataclass(frozen=True)
class Imported:
    questions: int
    groups: int
    left_out: int


def write_playbook(file: Path, out: Path) -> Imported:
    """Each question once, in the order of the file. Lines without others that begin alike are left out, since nothing
    tells their document from their question; so are those that are no requests.

    Raises:
        BatchFileError: the file cannot be read.
    """
    index = index_file(file, "")
    found: dict[str, None] = {}
    count = left_out = 0
    with file.open("rb") as source:
        for group in groups(index.lines):
            requests = []
            for line in group:
                try:
                    requests.append(parse_body(*parse_line(index.read(source, line), line.number), max_tokens=_ANY))
                except BodyRefused:
                    left_out += 1
            if len(requests) < 2:
                left_out += len(requests)
                continue
            count += 1
            found |= dict.fromkeys(_questions(requests))
    left_out += sum(line.refused is not None for line in index.lines)
    entries: list[dict[str, Any]] = [{"id": f"q{number}", "question": text} for number, text in enumerate(found, 1)]
    written = yaml.safe_dump(
        {"playbook": f"From {file.name}", "questions": entries}, allow_unicode=True, sort_keys=False
    )
    out.write_text(written, "utf-8")
    return Imported(len(found), count, left_out)


def _questions(requests: list[BatchRequest]) -> list[str]:
    """The last message of each, behind what all of the group begin with, cut back to a line's end; to a blank where a
    document ends within a line."""
    texts = [request.messages[-1].content for request in requests]
    common = os.path.commonprefix(texts)  # noqa: RUF071 # characters are meant
    if common in texts:  # one says no more than all
        common = common[: common.rstrip().rfind("\n") + 1]
    cut = common.rfind("\n") + 1
    if not cut and len(common) > BLOCK_CHARS:
        cut = common.rfind(" ") + 1
    return [text[cut:].strip() for text in texts if text[cut:].strip()]
