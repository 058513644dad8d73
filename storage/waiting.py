"""What waits for an answer, and what of a question changes it."""

from typing import Any

from sqlalchemy import ColumnElement, and_, exists, not_, or_

from storage.schema import READING, SPEC_PARAM, ItemRow, JobRow, ReadingRow


def is_to_be_asked() -> ColumnElement[bool]:
    """Of an item and its job in a query: it waits for an answer that has to be computed. Not so what waits for the
    snapshot alone, and what may have been answered before, until its document's prefill has looked."""
    looked = (
        exists()
        .where(ReadingRow.job_id == ItemRow.job_id, ReadingRow.document_id == ItemRow.document_id)
        .correlate(ItemRow)
    )
    return and_(ItemRow.question_position != READING, or_(not_(JobRow.reuse_answers), looked))


def asked_params(params: dict[str, Any]) -> dict[str, Any]:
    """Of a question's params those that change its answer."""
    return {name: value for name, value in params.items() if name != SPEC_PARAM}
