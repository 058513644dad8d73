"""An answer that was put together from those of a document's sections."""

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.report.evidence import Evidence

_LONG = 60  # characters; longer answers stand on lines of their own


@dataclass(frozen=True)
class MergedValue:
    """One of the answers that the sections of a document gave, as people write it, with all places that show it.
    `sections` are the numbers, from 1, of those that gave it."""

    shown: str
    value: Any
    quotes: tuple[Evidence, ...]
    sections: tuple[int, ...]

    @property
    def pages(self) -> list[int]:
        return sorted({quote.page for quote in self.quotes})

    def record(self) -> dict[str, Any]:
        quotes = [quote._asdict() for quote in self.quotes]
        return {"answer": self.shown, "value": self.value, "quotes": quotes, "sections": list(self.sections)}


@dataclass(frozen=True)
class Merged:
    """How an answer was put together: the sections of the document, and what they said. `values`: the different answers
    that count, in the document's order."""

    sections: int
    answered: int
    not_found: int
    failed: int
    waiting: int
    values: tuple[MergedValue, ...]

    @property
    def note(self) -> str:
        """In words, for people."""
        counts = {"answered": self.answered, "not found": self.not_found, "failed": self.failed, "open": self.waiting}
        return f"merged: {self.sections} sections, " + ", ".join(f"{n} {name}" for name, n in counts.items() if n)

    @property
    def listed(self) -> str:
        """The answers; several of them with their pages."""
        if len(self.values) < 2:
            return self.values[0].shown if self.values else ""
        long = any("\n" in value.shown or len(value.shown) > _LONG for value in self.values)
        return (";\n" if long else "; ").join(_with_pages(value) for value in self.values)

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "values": [value.record() for value in self.values]}


def _with_pages(value: MergedValue) -> str:
    return f"{value.shown} (p. {', '.join(map(str, value.pages))})" if value.pages else value.shown
