from pathlib import Path

import openpyxl
import pytest

from pipeline.errors import QuestionFileError
from pipeline.playbooks.answer_types import AnswerSpec, AnswerType
from pipeline.playbooks.check import check_playbooks
from pipeline.playbooks.library import built_in_names
from pipeline.playbooks.prompt import question_prompt
from pipeline.questions import load_question_set, load_questions

FULL = """
playbook: Cap
questions:
  - id: cap
    title: Liability cap
    type: choice
    choices: [capped, not capped]
    guidance: Look in the clause on liability.
    question: Is liability limited?
    quote: true
    max_tokens: 12
"""


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_every_kind_of_file_can_say_everything(tmp_path: Path) -> None:
    columns = ["id", "title", "type", "choices", "guidance", "question", "quote", "max_tokens"]
    cells = ["cap", "Liability cap", "Choice", "capped | not capped", "Look in the clause on liability."]
    cells += ["Is liability limited?", "TRUE", "12"]
    write(tmp_path, "q.csv", ",".join(columns) + "\n" + ",".join(cells))
    book = openpyxl.Workbook()
    book.active.append(columns)
    book.active.append([*cells[:6], True, 12])
    book.save(tmp_path / "q.xlsx")

    (yaml,) = load_questions([write(tmp_path, "q.yaml", FULL)], [])
    (csv,) = load_questions([tmp_path / "q.csv"], [])
    (xlsx,) = load_questions([tmp_path / "q.xlsx"], [])

    assert yaml.error is None
    assert yaml == csv == xlsx
    assert yaml.spec == AnswerSpec(
        AnswerType.CHOICE, ("capped", "not capped", "Not found"), True, yaml.asked, "question-1"
    )
    assert AnswerSpec.of(yaml.spec.record()) == yaml.spec


def test_rows_of_a_workbook_are_told_by_their_number(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    for row in (["question", "max_tokens"], ["A?"], [], ["B?", "many"]):
        book.active.append(row)
    book.save(tmp_path / "q.xlsx")

    (problem,) = check_playbooks([tmp_path / "q.xlsx"], {}).problems

    assert "q.xlsx, row 4 is wrong in max_tokens" in problem.sentence
    assert problem.line == 4


def test_a_plain_question_is_asked_as_it_stands() -> None:
    assert question_prompt("Who signs?", title="Signatures") == "Who signs?"


def test_what_is_asked_follows_from_the_entry_alone() -> None:
    """Changing these words changes answers: raise TEMPLATE with them."""
    english = question_prompt("Is it limited?", title="Cap", guidance="See 8.", answer_type=AnswerType.YES_NO)
    chinese = question_prompt("付款期限？", answer_type=AnswerType.CHOICE, choices=("三十日", "六十日"))

    assert english == (
        "Cap: Is it limited?\nSee 8.\nAnswer with Yes or No.\nIf the document does not say, answer: Not found."
    )
    assert chinese == "付款期限？\n请只回答下列之一：三十日；六十日。\n文件中没有写明的，请回答：未找到。"


def test_variables_are_filled_in_and_the_nearest_to_the_user_wins(tmp_path: Path) -> None:
    write(tmp_path, "inner.yaml", "variables: {party: inner, place: inner}\nquestions: ['{party} {place} {{party}}?']")
    outer = write(tmp_path, "outer.yaml", "variables: {party: outer}\ninclude: inner.yaml\nquestions: ['{party}?']")

    assert [q.text for q in load_questions([outer], [])] == ["outer inner {party}?", "outer?"]
    assert [q.text for q in load_questions([outer], [], {"party": "I"})] == ["I inner {party}?", "I?"]


def test_a_variable_without_value_is_a_fault_of_its_question(tmp_path: Path) -> None:
    path = write(tmp_path, "q.jsonl", '"A {party}?"\n"B?"\n')

    bad, good = load_questions([path], [])

    assert bad.error == "The question at q.jsonl, line 1 uses {party}, which has no value; give --set party=VALUE."
    assert good.error is None
    assert load_question_set([path], [], {"party": "x", "paty": "y"}).unused == ["paty"]


def test_includes_stand_where_they_are_written_in_every_format(tmp_path: Path) -> None:
    write(tmp_path, "b.yaml", "- {id: b, question: 'B?'}")
    files = {
        "a.yaml": "- A?\n- include: b.yaml\n- C?",
        "a.jsonl": '"A?"\n{"include": "b.yaml"}\n"C?"',
        "a.csv": "question,include\nA?,\n,b.yaml\nC?,",
    }

    for name, text in files.items():
        assert [q.text for q in load_questions([write(tmp_path, name, text)], [])] == ["A?", "B?", "C?"]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("- A?\n- include: absent.yaml", 2, "absent.yaml is neither a file beside it nor a built-in playbook"),
        ("- A?\n- include: a.yaml", 2, "includes itself"),
        ("include: [[x]]\nquestions: []", 1, "needs the name of a playbook"),
        ("variables: [x]\nquestions: [A]", 1, "needs a text for each name"),
    ],
)
def test_a_wrong_include_names_its_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(QuestionFileError, match=message) as caught:
        load_questions([write(tmp_path, "a.yaml", text)], [])

    assert caught.value.line == line


def test_a_check_tells_everything_at_once_with_line_and_column(tmp_path: Path) -> None:
    wrong = "questions:\n- question: A?\n  max_tokens: 0\n  type: number\n- question: B?\n  type: choice\n- ''\n"
    one = write(tmp_path, "one.yaml", wrong)
    two = write(tmp_path, "two.jsonl", '"A?"\n{\n"B?"\n}\n')

    checked = check_playbooks([one, two, tmp_path / "absent.csv"], {})

    places = {(problem.path.name, problem.line, problem.column) for problem in checked.problems if problem.path}
    assert places == {
        *{("two.jsonl", 2, None), ("two.jsonl", 4, None), ("absent.csv", None, None)},
        *{("one.yaml", 3, 15), ("one.yaml", 4, 9), ("one.yaml", 5, None), ("one.yaml", 7, None)},
    }
    assert all(problem.sentence.endswith(".") and "\n" not in problem.sentence for problem in checked.problems)


@pytest.mark.parametrize(("name", "count"), [("cuad", 41), ("nda", 17)])
def test_built_in_playbooks_are_whole(name: str, count: int) -> None:
    checked = check_playbooks([Path(name)], {})

    assert built_in_names() == ["cuad", "nda"]
    assert not checked.problems
    assert len(checked.questions) == len({question.text for question in checked.questions}) == count
    assert all(question.quote and question.max_tokens for question in checked.questions)


def test_a_file_of_ones_own_goes_before_a_built_in_playbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine.yaml", "include: cuad\n")

    assert len(load_questions([Path("mine.yaml")], [])) == 41
