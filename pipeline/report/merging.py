"""One answer from those that the sections of a long document gave. docs/long-documents.md states the rule.

From the rows, at the time of the report: nothing is stored, so a section that is tried again or forgotten changes the
merged answer by itself.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.playbooks.answer_types import AnswerType
from pipeline.report.cells import Cell, CellStatus, show_value
from pipeline.report.evidence import Evidence
from pipeline.report.merged import Merged, MergedValue
from storage.job_report import ReportRow
from storage.schema import ItemState

_LISTED = (AnswerType.TEXT, AnswerType.LIST)  # of which a document may well hold several


def merge(row: ReportRow, cells: Sequence[Cell]) -> tuple[ReportRow, Cell]:
    """The row and the cell of a question, from the cells of the document's sections in order, whose quotes are already
    places in the whole document."""
    count = {status: sum(cell.status == status for cell in cells) for status in CellStatus}
    counted = _counted(cells)
    merged = Merged(
        sections=len(cells),
        answered=count[CellStatus.ANSWERED],
        not_found=count[CellStatus.NOT_FOUND],
        failed=count[CellStatus.ERROR],
        waiting=count[CellStatus.PENDING],
        values=_values(counted),
    )
    first = next((cell for _, cell in counted if cell.quotes), counted[0][1] if counted else cells[0])
    cell = replace(_at_first_quote(first, merged), doubt=None, merged=merged)
    if merged.waiting:
        return _pending(row, cell, merged)
    if not counted:
        return _without_answer(row, cell, merged, cells)
    doubts = list(dict.fromkeys(filter(None, (each.doubt for _, each in counted))))
    several = len(merged.values) > 1
    if several and cell.type not in _LISTED:
        doubts.insert(0, f"{len(merged.values)} different answers")
    if merged.failed:
        doubts.append(_failures(merged, cells))
    cell = replace(_of_several(cell, merged) if several else cell, doubt="; ".join(doubts) or None)
    return replace(row, answer=cell.shown if several else cell.text), cell


def _counted(cells: Sequence[Cell]) -> list[tuple[int, Cell]]:
    """The answers that count, with the numbers of their sections: where a value is asked for, the best supported ones.

    One with a value of the type goes before one without, then one with evidence before one without.
    """
    answered = [(number, cell) for number, cell in enumerate(cells, 1) if cell.status == CellStatus.ANSWERED]
    if not answered or answered[0][1].type in _LISTED:
        return answered
    best = max((cell.parsed, cell.verified) for _, cell in answered)
    return [(number, cell) for number, cell in answered if (cell.parsed, cell.verified) == best]


def _values(counted: list[tuple[int, Cell]]) -> tuple[MergedValue, ...]:
    """Equal ones once, with the evidence of all."""
    equal: dict[str, list[tuple[int, Cell]]] = {}
    for number, cell in counted:
        equal.setdefault(_key(cell), []).append((number, cell))
    return tuple(
        MergedValue(
            shown=same[0][1].shown,
            value=same[0][1].value,
            quotes=_distinct([quote for _, cell in same for quote in cell.quotes]),
            sections=tuple(number for number, _ in same),
        )
        for same in equal.values()
    )


def _key(cell: Cell) -> str:
    """Equal where two answers say the same: one value, or the same words but for case, blanks and the last stop."""
    words = cell.shown if cell.parsed and cell.type != AnswerType.TEXT else cell.text
    if cell.parsed and cell.type == AnswerType.YES_NO:
        words = str(cell.value)
    return " ".join(words.casefold().split()).rstrip(".。 ")


def _distinct(quotes: list[Evidence]) -> tuple[Evidence, ...]:
    """In the document's order, without what lies within another: neighbouring sections overlap."""
    kept: list[Evidence] = []
    for quote in sorted(quotes, key=lambda quote: (quote.start, -quote.stop)):
        if not kept or quote.stop > kept[-1].stop:
            kept.append(quote)
    return tuple(kept)


def _at_first_quote(cell: Cell, merged: Merged) -> Cell:
    first = next((quote for value in merged.values for quote in value.quotes), None)
    return cell if first is None else replace(cell, **first._asdict(), verified=True)


def _of_several(cell: Cell, merged: Merged) -> Cell:
    """Lists are joined; of other kinds, several values are no value."""
    values = [value.value for value in merged.values]
    if cell.type == AnswerType.LIST and all(isinstance(value, list) for value in values):
        items = list(dict.fromkeys(item for value in values for item in value))
        return replace(cell, parsed=True, value=items, text=show_value(AnswerType.LIST, items, ""))
    return replace(cell, parsed=False, value=None, text="; ".join(value.shown for value in merged.values))


def _pending(row: ReportRow, cell: Cell, merged: Merged) -> tuple[ReportRow, Cell]:
    """What is there is shown, and marked: a later section may still change it."""
    done = merged.sections - merged.waiting
    text = f"in work: {done} of {merged.sections} sections" if done or row.state == ItemState.RUNNING else "waiting"
    so_far = merged.listed or ("not found" if merged.not_found else "")
    text = f"{text}; so far: {so_far}" if so_far else text
    cell = replace(cell, status=CellStatus.PENDING, text=text, parsed=False, value=None)
    return replace(row, answer=so_far or None), cell


def _without_answer(row: ReportRow, cell: Cell, merged: Merged, cells: Sequence[Cell]) -> tuple[ReportRow, Cell]:
    """Not found counts only where every section was read."""
    if not merged.failed:
        return replace(row, answer=cell.text), cell
    error = (
        cells[0].text if merged.failed == merged.sections else f"Not found elsewhere, but {_failures(merged, cells)}"
    )
    if merged.not_found:
        row = replace(row, state=ItemState.FAILED, error_code="sections_failed", error=error)
    return row, replace(cell, status=CellStatus.ERROR, text=error, parsed=False, value=None)


def _failures(merged: Merged, cells: Sequence[Cell]) -> str:
    why = next(cell.text for cell in cells if cell.status == CellStatus.ERROR)
    return f"{merged.failed} of {merged.sections} sections have no answer: {why}"
