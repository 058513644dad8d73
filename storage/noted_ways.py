"""How each document's questions were last sent, on its row."""

from collections.abc import Mapping

from sqlalchemy import func, select, tuple_, update
from sqlalchemy.orm import Session

from storage.schema import AnswerRow, DocumentRow, ItemRow
from storage.ways import AS_MODE_SAYS, Choice, DocumentKey, Way, Why


def note_choices(session: Session, choices: Mapping[DocumentKey, Choice]) -> None:
    """Records how each document's questions are sent. A row that another process changes just now is left to it."""
    by_choice: dict[Choice, list[DocumentKey]] = {}
    for key, choice in choices.items():
        by_choice.setdefault(choice, []).append(key)
    for choice, keys in by_choice.items():
        free = (
            select(DocumentRow.tenant, DocumentRow.document_id)
            .where(tuple_(DocumentRow.tenant, DocumentRow.document_id).in_(keys))
            .with_for_update(skip_locked=True)
        )
        session.execute(
            update(DocumentRow)
            .where(tuple_(DocumentRow.tenant, DocumentRow.document_id).in_(free))
            .values(sent_way=choice.way, sent_why=choice.why)
            .execution_options(synchronize_session=False)
        )


def noted_choice(session: Session, key: DocumentKey) -> Choice | None:
    """How the document's questions were last sent; None: nobody has chosen."""
    row = session.execute(
        select(DocumentRow.sent_way, DocumentRow.sent_why).where(
            DocumentRow.tenant == key.tenant, DocumentRow.document_id == key.document_id
        )
    ).one_or_none()
    return None if row is None else choice_of(row.sent_way, row.sent_why)


def choice_of(way: str | None, why: str | None) -> Choice | None:
    """What a document's row says."""
    return None if way is None or why is None else Choice(Way(way), Why(why))


def split_choice(session: Session, key: DocumentKey) -> Choice:
    """Why what is answered from a stored snapshot is: as it was sent, or because the snapshot was there after all."""
    noted = noted_choice(session, key)
    if noted is None:
        return AS_MODE_SAYS
    return noted if noted.way == Way.SPLIT else Choice(Way.SPLIT, Why.READY)


def answers_by_choice(session: Session, key: DocumentKey) -> dict[Choice, int]:
    """The document's answers that were given, not taken over."""
    rows = session.execute(
        select(AnswerRow.way, AnswerRow.why, func.count())
        .join(ItemRow, ItemRow.item_id == AnswerRow.item_id)
        .where(ItemRow.tenant == key.tenant, ItemRow.document_id == key.document_id, AnswerRow.carried_from.is_(None))
        .group_by(AnswerRow.way, AnswerRow.why)
        .order_by(AnswerRow.way, AnswerRow.why)
    )
    return {Choice(Way(way), Why(why)): count for way, why, count in rows}
