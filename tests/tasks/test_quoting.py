"""Answers with the words of the document that the model chose for them."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from kernels import halving
from kernels.decode import Decoder
from kernels.errors import BatchTooLarge
from kernels.phrases import QUOTE_PROMPT
from pipeline.report.cells import EvidenceFrom
from pipeline.report.rows import report_lines
from pipeline.submit import Submission
from storage.progress import job_status
from storage.schema import AnswerRow, ItemState
from tasks.decode import answer_waiting
from tasks.workplace import Workplace
from tests.tasks.conftest import TEXT
from tests.tasks.test_decode import answers_of, prepared

Submit = Callable[..., Submission]
CHINESE = "第一条　甲方应付款🖋。第二条　乙方应在三十日内交货。\n" * 6


@pytest.mark.parametrize("text", [TEXT, CHINESE], ids=["English", "Chinese"])
def test_every_quote_is_the_document_text_at_its_place(place: Workplace, submit_texts: Submit, text: str) -> None:
    plain = submit_texts(place, text, questions=9)
    row = prepared(place)
    answer_waiting(place, row)
    quoted = submit_texts(place, text, questions=9, quote=True)

    assert not answer_waiting(place, row)

    assert answers_of(place, quoted.job_id) == answers_of(place, plain.job_id)
    lines = list(report_lines(place.database, place.store, "default", quoted.job_id))
    asked = [line for line in lines if line.row.answer]
    assert asked
    assert {line.row.quote_prompt for line in asked} == {QUOTE_PROMPT}
    for line in asked:
        quote = line.row.quote
        assert quote is None or quote == text[line.row.quote_start : line.row.quote_stop]
        if quote is not None and line.cell.quote is not None:
            assert (line.cell.quote, line.cell.verified) == (quote, True)
            assert line.cell.evidence in (EvidenceFrom.QUOTED, None)


def test_answers_without_a_quote_are_not_asked_for_one(place: Workplace, submit_texts: Submit) -> None:
    submit_texts(place, TEXT)
    answer_waiting(place, prepared(place))

    with place.database.reading() as session:
        assert {answer.quote_prompt for answer in session.scalars(select(AnswerRow))} == {None}


def test_where_memory_runs_out_under_a_quote_every_answer_still_comes(
    place: Workplace, submit_texts: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = submit_texts(place, TEXT, questions=6, quote=True)
    row = prepared(place)
    step, failures = Decoder._step, iter([True])

    def failing(self: Decoder) -> Any:
        running = [each.request for document in self._documents for each in document.running]
        if len(running) > 1 and any(request.quotes for request in running) and next(failures, False):
            raise BatchTooLarge(running)
        yield from step(self)

    monkeypatch.setattr(Decoder, "_step", failing)
    monkeypatch.setattr(halving, "_give_back", lambda: None)

    answer_waiting(place, row)

    with place.database.reading() as session:
        assert job_status(session, "default", submitted.job_id).items == {ItemState.ANSWERED: 6}
    assert next(failures, None) is None


def test_a_quote_that_does_not_fit_leaves_the_answer(place: Workplace, submit_texts: Submit) -> None:
    text = TEXT
    own = len(place.engine.prompter.prefix_ids("")) + len(
        place.engine.prompter.question_ids("What does article 0 say?")
    )
    while len(text) + own + 40 < place.engine.context_len:
        text += "x"
    submitted = submit_texts(place, text, questions=1, quote=True)
    answer_waiting(place, prepared(place))

    (line,) = report_lines(place.database, place.store, "default", submitted.job_id)
    assert line.row.state == ItemState.ANSWERED
    assert line.row.quote_prompt is None
