from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Tracked(StrEnum):
    """What becomes of the tracked changes of a Word file."""

    ACCEPT = "accept"
    REJECT = "reject"
    MARK = "mark"


class Normalise(StrEnum):
    """What is evened out besides spelling and blanks: nothing, or the furniture of pages and blank lines."""

    PLAIN = "plain"
    FURNITURE = "furniture"


class Split(StrEnum):
    """What becomes of a document that is longer than the model's context."""

    REFUSE = "refuse"
    SECTIONS = "sections"


@dataclass(frozen=True)
class ReadOptions:
    """How files are read. Whatever changes a text changes the document's id with it."""

    tracked: Tracked = Tracked.ACCEPT
    comments: bool = False
    normalise: Normalise = Normalise.PLAIN
    ocr: bool = False

    @classmethod
    def of(cls, record: dict[str, Any]) -> "ReadOptions":
        """From what `asdict` gives, also by way of JSON."""
        choices = {"tracked": Tracked(record["tracked"]), "normalise": Normalise(record["normalise"])}
        return cls(**{**record, **choices})


AS_USUAL = ReadOptions()


@dataclass(frozen=True)
class ParseLimits:
    """What one document may cost; memory is what parsing it may add to a process that has loaded the parsers."""

    time_s: float = 60
    memory_bytes: int = 2 * 2**30
    max_file_bytes: int = 200 * 2**20
