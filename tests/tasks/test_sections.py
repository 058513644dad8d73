"""A document beyond the context, read in sections: from the file to the merged answer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from kernels.phrases import MOST_QUOTE_TOKENS
from pipeline.documents import Split
from pipeline.report.cells import CellStatus
from pipeline.report.rows import ReportLine, report_lines
from pipeline.submit import Submission
from storage.progress import job_readings, job_status
from storage.schema import SectionRow
from storage.snapshots import get_snapshot
from tasks.decode import answer_waiting
from tasks.prefill import prepare_snapshot
from tasks.workplace import Workplace
from tests.short_model import shortened
from tests.tasks.conftest import TEXT

Submit = Callable[..., Submission]
LONG = TEXT.strip()
SHORT = TEXT[:300]


@pytest.fixture
def tiny_model(tiny_model: Path, tmp_path: Path) -> Path:
    return shortened(tiny_model, tmp_path)


def sections_of(place: Workplace, job_id: str) -> list[SectionRow]:
    with place.database.reading() as session:
        return list(
            session.scalars(select(SectionRow).where(SectionRow.job_id == job_id).order_by(SectionRow.position))
        )


def work_off(place: Workplace, document_ids: list[str]) -> None:
    for document_id in document_ids:
        snapshot_id = prepare_snapshot(place, "default", document_id)
        if snapshot_id is not None:
            with place.database.reading() as session:
                row = get_snapshot(session, snapshot_id)
            assert not answer_waiting(place, row)


def lines_of(place: Workplace, made: Submission) -> list[ReportLine]:
    return list(report_lines(place.database, place.store, "default", made.job_id))


def test_every_section_is_asked_and_the_answers_become_one_row_with_quotes_of_the_whole_text(
    place: Workplace, submit_texts: Submit
) -> None:
    made = submit_texts(place, LONG, questions=3, split=Split.SECTIONS, quote=True)
    sections = sections_of(place, made.job_id)
    assert (made.documents, made.split, made.sections) == (1, 1, len(sections)) and len(sections) > 1

    work_off(place, [section.section_id for section in sections])

    with place.database.reading() as session:
        status = job_status(session, "default", made.job_id)
        readings = job_readings(session, "default", made.job_id)
    assert (status.done, status.rows, status.split) == (3 * len(sections), 3, 1)
    lines = lines_of(place, made)
    assert len(lines) == 3
    for line in lines:
        merged = line.cell.merged
        assert merged is not None and line.cell.status in (CellStatus.ANSWERED, CellStatus.NOT_FOUND)
        assert (merged.sections, merged.failed, merged.waiting) == (len(sections), 0, 0)
        assert line.row.cached_tokens == sum(reading.num_tokens for reading in readings)
        assert all(quote.quote == LONG[quote.start : quote.stop] for quote in line.cell.quotes)
    assert any(line.cell.quotes for line in lines)


def test_a_document_that_fits_is_read_whole_and_what_is_read_shows_no_difference(
    place: Workplace, submit_texts: Submit
) -> None:
    made = submit_texts(place, SHORT, split=Split.SECTIONS)
    again = submit_texts(place, SHORT)

    assert (made.split, made.sections, sections_of(place, made.job_id)) == (0, 0, [])
    whole = [line.row.document_id for line in lines_of(place, made)]
    assert whole == [line.row.document_id for line in lines_of(place, again)]


def test_a_half_finished_job_shows_what_is_there_and_says_so(place: Workplace, submit_texts: Submit) -> None:
    made = submit_texts(place, LONG, questions=2, split=Split.SECTIONS)
    sections = sections_of(place, made.job_id)

    work_off(place, [sections[0].section_id])

    for line in lines_of(place, made):
        assert line.cell.status == CellStatus.PENDING
        assert line.cell.text.startswith(f"in work: 1 of {len(sections)} sections")


def test_the_next_night_carries_the_answers_of_every_section_over(place: Workplace, submit_texts: Submit) -> None:
    first = submit_texts(place, LONG, split=Split.SECTIONS)
    ids = [section.section_id for section in sections_of(place, first.job_id)]
    work_off(place, ids)

    second = submit_texts(place, LONG, split=Split.SECTIONS, reuse_answers=True)
    work_off(place, ids)

    lines = lines_of(place, second)
    assert [line.cell.shown for line in lines] == [line.cell.shown for line in lines_of(place, first)]
    assert all(line.row.carried_from is not None for line in lines)


def test_behind_every_section_there_is_room_for_the_longest_answer_and_quote(
    place: Workplace, submit_texts: Submit
) -> None:
    made = submit_texts(place, LONG, split=Split.SECTIONS, quote=True)

    prompter = place.engine.prompter
    asked = [prompter.quote_ids(f"What does article {n} say?", "") for n in range(3)]
    for section in sections_of(place, made.job_id):
        prefix = prompter.prefix_ids(LONG[section.start : section.stop])
        assert len(prefix) + max(map(len, asked)) + 8 + MOST_QUOTE_TOKENS <= place.engine.context_len
