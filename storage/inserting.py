"""Inserting rows that another process may have inserted already."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from storage.schema import Base


def insert_new(session: Session, table: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Inserts the rows whose unique keys are not there yet and leaves the others as they are."""
    if not rows:
        return
    if session.get_bind().dialect.name == "sqlite":
        session.execute(sqlite.insert(table).on_conflict_do_nothing(), list(rows))
    else:
        session.execute(postgresql.insert(table).on_conflict_do_nothing(), list(rows))
