"""Contracts with gold answers, in the format of ContractNLI (Koreeda and Manning, EMNLP Findings 2021).

A statement about a contract is entailed, contradicted or not mentioned, with the spans of the text that show it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EvaluationFileError

Span = tuple[int, int]


@dataclass(frozen=True)
class Gold:
    """`label` is Entailment, Contradiction or NotMentioned; `spans` are characters [start, stop) that show it."""

    label: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class GoldDocument:
    name: str
    text: str
    answers: dict[str, Gold]  # by the statement's id


def read_gold(path: Path, limit: int | None) -> list[GoldDocument]:
    """The first `limit` documents.

    Raises:
        EvaluationFileError: the file cannot be read or has another format.
    """
    try:
        documents = json.loads(path.read_text("utf-8-sig"))["documents"]
        return [_document(document) for document in documents[:limit]]
    except OSError as exc:
        raise EvaluationFileError(path, exc.strerror or str(exc)) from exc
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as exc:
        raise EvaluationFileError(path, "it is not in ContractNLI's format") from exc


def _document(document: dict[str, Any]) -> GoldDocument:
    spans = document["spans"]
    annotations = document["annotation_sets"][0]["annotations"]
    answers = {
        name: Gold(gold["choice"], tuple((int(spans[at][0]), int(spans[at][1])) for at in gold["spans"]))
        for name, gold in annotations.items()
    }
    return GoldDocument(str(document["file_name"]), str(document["text"]), answers)
