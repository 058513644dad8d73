"""The single numbers that percentiles are taken of: prefill, load, first token; and how work went."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from storage.schema import AnswerRow, ItemRow, JobRow, ReadingRow
from storage.ways import Way, Why

MOST = 200_000  # the newest; percentiles of more would say the same


@dataclass(frozen=True)
class OfWay:
    """Answers that came one way: how many for each reason, and the seconds of the newest, reading included where who
    answered had to read."""

    whys: dict[Why, int]
    first_token_s: list[float]
    total_s: list[float]

    @property
    def answers(self) -> int:
        return sum(self.whys.values())


@dataclass(frozen=True)
class Measures:
    """Seconds, one entry for each document read, snapshot loaded, and answer; counts over the same time. `loads`: how
    often a snapshot was answered from, by where it came from (memory, copies, store)."""

    prefill_s: list[float]
    load_s: list[float]
    first_token_s: list[float]
    looked_up: int
    found_ready: int
    computed_tokens: int
    ways: dict[Way, OfWay]
    carried_answers: int
    cached_tokens: int
    output_tokens: int
    loads: dict[str, int]


def measures(session: Session, *, tenant: str | None, since: datetime | None) -> Measures:
    """Of one tenant or (None) of all."""
    of_readings = [JobRow.tenant == tenant] if tenant is not None else []
    of_answers = [ItemRow.tenant == tenant] if tenant is not None else []
    if since is not None:
        of_readings.append(ReadingRow.created_at >= since)
        of_answers.append(AnswerRow.created_at >= since)
    readings = select(ReadingRow).join(JobRow, JobRow.job_id == ReadingRow.job_id).where(*of_readings).subquery()
    answers = select(AnswerRow).join(ItemRow, ItemRow.item_id == AnswerRow.item_id).where(*of_answers).subquery()
    looked_up, ready, computed = session.execute(
        select(
            func.count(),
            func.coalesce(func.sum(case((readings.c.way == "found", 1), else_=0)), 0),
            func.coalesce(func.sum(readings.c.computed_tokens), 0),
        ).select_from(readings)
    ).one()
    given = answers.c.carried_from.is_(None)
    carried, cached, written = session.execute(
        select(
            func.coalesce(func.sum(case((given, 0), else_=1)), 0),
            func.coalesce(func.sum(case((given, answers.c.cached_tokens), else_=0)), 0),
            func.coalesce(func.sum(case((given, answers.c.output_tokens), else_=0)), 0),
        ).select_from(answers)
    ).one()

    sources = session.execute(
        select(answers.c.loaded_from, func.count())
        .where(given, answers.c.loaded_from.is_not(None))
        .group_by(answers.c.loaded_from)
    ).all()

    def newest(column: str, condition: object) -> list[float]:
        query = select(answers.c[column]).where(condition).order_by(answers.c.item_id.desc()).limit(MOST)  # type: ignore[arg-type] # a column's comparison
        return list(session.scalars(query))

    reasons = session.execute(
        select(answers.c.way, answers.c.why, func.count()).where(given).group_by(answers.c.way, answers.c.why)
    ).all()
    ways = {
        way: OfWay(
            whys={Why(why): count for of, why, count in reasons if of == way},
            first_token_s=newest("first_token_s", given & (answers.c.way == way)),
            total_s=newest("total_s", given & (answers.c.way == way)),
        )
        for way in Way
    }
    read_s = select(readings.c.prefill_s).where(readings.c.computed_tokens > 0)
    return Measures(
        prefill_s=list(session.scalars(read_s.order_by(readings.c.created_at.desc()).limit(MOST))),
        load_s=newest("load_s", answers.c.load_s > 0),
        first_token_s=newest("first_token_s", given),
        looked_up=looked_up,
        found_ready=int(ready),
        computed_tokens=int(computed),
        ways=ways,
        carried_answers=int(carried),
        cached_tokens=int(cached),
        output_tokens=int(written),
        loads={row[0]: row[1] for row in sources},
    )
