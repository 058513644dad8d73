import json
import os
import re
import string
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.errors import QuestionFileError
from pipeline.questions import Question, load_questions

SAMPLES = Path(__file__).resolve().parents[2] / "pipeline" / "samples"


def load(folder: Path, name: str, content: str | bytes) -> list[Question]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_questions([path], [])


def texts(questions: list[Question]) -> list[str]:
    return [question.text for question in questions]


SAME_TWO_QUESTIONS = {
    "list.yaml": "- Who signs?\n- id: cap\n  title: Cap\n  question: |\n    What is\n    the cap?\n  max_tokens: 9\n",
    "mapping.yml": (
        "title: Review\nquestions:\n  - Who signs?\n"
        '  - {id: cap, title: Cap, question: "What is\\nthe cap?", max_tokens: 9}'
    ),
    "table.csv": 'id,Question ,title,max_tokens\r\n,Who signs?,,\r\ncap,"What is\nthe cap?",Cap,9\r\n',
    "lines.jsonl": (
        '"Who signs?"\n\n{"id": "cap", "title": "Cap", "question": "What is\\nthe cap?", "max_tokens": 9}\n'
    ),
}


@pytest.mark.parametrize("name", SAME_TWO_QUESTIONS)
def test_every_kind_of_file_gives_the_same_questions(name: str, tmp_path: Path) -> None:
    plain, full = load(tmp_path, name, SAME_TWO_QUESTIONS[name])

    assert plain == Question("q1", "Who signs?", "Who signs?")
    assert full == Question("cap", "Cap", "What is\nthe cap?", max_tokens=9)


def test_a_text_file_holds_one_question_a_line_besides_blanks_and_remarks(tmp_path: Path) -> None:
    questions = load(tmp_path, "list.TXT", "# Sales\r\n\r\n Who signs? \r\n\t# more\nWhat is due, \u2028and when?")

    assert texts(questions) == ["Who signs?", "What is due, \u2028and when?"]
    assert [question.question_id for question in questions] == ["q1", "q2"]


def test_questions_of_all_files_and_the_command_line_are_numbered_through(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.jsonl"
    one.write_text("A?\nB?\n")
    two.write_text('{"id": "c", "question": "C?"}\n"D?"\n')

    questions = load_questions([one, two], ["E?"])

    assert [(question.question_id, question.text) for question in questions] == [
        *[("q1", "A?"), ("q2", "B?"), ("c", "C?"), ("q4", "D?"), ("q5", "E?")]
    ]


def test_the_sample_checklist_is_all_good() -> None:
    questions = load_questions([SAMPLES / "checklist.yaml"], [])

    assert len(questions) == len(yaml.safe_load((SAMPLES / "answers.yaml").read_text())["answers"])
    assert not any(question.error for question in questions)


@pytest.mark.parametrize("name", ["list.txt", "list.yaml", "list.csv", "list.jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_question(name: str, tmp_path: Path) -> None:
    content = {"list.txt": "é?", "list.yaml": "- é?", "list.csv": "question\né?", "list.jsonl": '"é?"'}[name]

    assert texts(load(tmp_path, name, content.encode("utf-8-sig"))) == ["é?"]


@pytest.mark.parametrize("answer", ["No", "yes", "007", "12.50", "2025-13-45", "1_0", "0x1F", "on", "=", "1:30"])
def test_what_looks_like_another_type_of_yaml_stays_text(answer: str, tmp_path: Path) -> None:
    (question,) = load(tmp_path, "list.yaml", f"- id: {answer.strip('=:')}\n  question: {answer}\n")

    assert question.text == answer


def test_yaml_fields_left_blank_are_left_out(tmp_path: Path) -> None:
    (question,) = load(tmp_path, "list.yaml", "- {question: 'A?', id: , title: ~, max_tokens: null, stop: ''}\n")

    assert question == Question("q1", "A?", "A?")


def test_text_may_be_repeated_in_yaml(tmp_path: Path) -> None:
    first, second = load(tmp_path, "list.yaml", "- {question: A, title: &t Fees}\n- {question: B, title: *t}\n")

    assert first.title == second.title == "Fees"


@pytest.mark.parametrize(
    ("name", "content", "stop"),
    [
        ("list.yaml", '- question: A?\n  stop: ["\\n\\n", " . "]', ("\n\n", " . ")),
        ("list.yaml", '- question: A?\n  stop: "###"', ("###",)),
        ("list.csv", "question,stop\nA?,###\n", ("###",)),
    ],
)
def test_stop_texts_are_kept_as_they_are(name: str, content: str, stop: tuple[str, ...], tmp_path: Path) -> None:
    (question,) = load(tmp_path, name, content)

    assert question.error is None
    assert question.stop == stop


SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 5}, "law": {"enum": ["No", "7", 7, 0.5, None, "1.0.0"]}},
    "additionalProperties": False,
}
SAME_FORMS = {
    "list.yaml": """
- question: A?
  choices: [Yes, No, 1]
- question: B?
  regex: " [0-9]+"
- question: C?
  json_schema:
    type: object
    properties: {sum: {type: integer, minimum: 5}, law: {enum: [No, "7", 7, 0.5, null, 1.0.0]}}
    additionalProperties: false
""",
    "list.csv": 'question,choices,regex,json_schema\nA?,Yes | No|1,,\nB?,," [0-9]+",\nC?,,,'
    + '"'
    + json.dumps(SCHEMA).replace('"', '""')
    + '"\n',
    "list.jsonl": "\n".join(
        json.dumps(entry)
        for entry in (
            {"question": "A?", "choices": ["Yes", "No", "1"]},
            {"question": "B?", "regex": " [0-9]+"},
            {"question": "C?", "json_schema": SCHEMA},
        )
    ),
}


@pytest.mark.parametrize("name", SAME_FORMS)
def test_every_kind_of_file_says_the_form_of_an_answer(name: str, tmp_path: Path) -> None:
    chosen, matched, parsed = load(tmp_path, name, SAME_FORMS[name])

    assert [question.error for question in (chosen, matched, parsed)] == [None] * 3
    assert chosen.choices == ("Yes", "No", "1")
    assert matched.regex == " [0-9]+"
    assert json.loads(parsed.json_schema or "") == SCHEMA


def test_a_long_question_is_its_own_title_cut_to_one_line(tmp_path: Path) -> None:
    (question,) = load(tmp_path, "list.yaml", "- |\n  Which of the\n  parties" + " must" * 30)

    assert question.title.startswith("Which of the parties must")
    assert question.title.endswith("…") and len(question.title) <= 60


# Each stands between two entries that can be asked.
BAD_ENTRIES = {
    "empty text": ('""', "empty_question", "is empty"),
    "blank text": ('{"question": " \\n", "id": "x"}', "empty_question", "is empty"),
    "no question": ('{"id": "x"}', "empty_question", "is empty"),
    "null": ("null", "bad_question", "not a question"),
    "number": ("7", "bad_question", "not a question"),
    "list": ('["A?"]', "bad_question", "not a question"),
    "question of another type": ('{"question": ["A?"]}', "bad_question", "question: Input should be a valid string"),
    "no tokens": ('{"question": "A?", "max_tokens": 0}', "bad_question", "max_tokens: .*greater than or equal to 1"),
    "too many tokens": ('{"question": "A?", "max_tokens": 5000}', "bad_question", "max_tokens"),
    "tokens in words": ('{"question": "A?", "max_tokens": "many"}', "bad_question", "max_tokens"),
    "endless tokens": ('{"question": "A?", "max_tokens": 1e999}', "bad_question", "max_tokens"),
    "huge tokens": ('{"question": "A?", "max_tokens": ' + "9" * 4000 + "}", "bad_question", "max_tokens"),
    "true tokens": ('{"question": "A?", "max_tokens": true}', "bad_question", "max_tokens"),
    "unknown field": ('{"question": "A?", "maxtokens": 3}', "bad_question", "unknown field maxtokens; there are"),
    "field of half a character": ('{"question": "A?", "b\\ud800": 3}', "bad_question", "its fields"),
    "id with a blank": ('{"question": "A?", "id": "my id"}', "bad_question", "letters, digits"),
    "id with a number sign": ('{"question": "A?", "id": "last#4"}', "bad_question", "letters, digits"),
    "long id": ('{"question": "A?", "id": "' + "x" * 101 + '"}', "bad_question", "up to 100"),
    "number as id": ('{"question": "A?", "id": 7}', "bad_question", "id: Input should be a valid string"),
    "id in use": (
        '{"question": "A?", "id": "first"}',
        "duplicate_question",
        "id first .* already used at list.*1;",
    ),
    "no choices": ('{"question": "A?", "choices": []}', "bad_question", "choices: .*at least 1"),
    "empty choice": ('{"question": "A?", "choices": ["a", " "]}', "bad_question", "choices.1"),
    "number as a choice": ('{"question": "A?", "choices": ["a", 1]}', "bad_question", "choices.1: .*valid string"),
    "broken regex": ('{"question": "A?", "regex": "[a"}', "bad_question", "regex: unclosed character class"),
    "regex that looks around": ('{"question": "A?", "regex": "a(?=b)"}', "bad_question", "regex: look-around"),
    "schema that is no object": ('{"question": "A?", "json_schema": 7}', "bad_question", "not a JSON object"),
    "broken schema text": ('{"question": "A?", "json_schema": "{"}', "bad_question", "it is not JSON"),
    "schema with a number that is none": (
        '{"question": "A?", "json_schema": {"minimum": NaN}}',
        "bad_question",
        "json_schema",
    ),
    "schema of half a character": (
        '{"question": "A?", "json_schema": {"enum": ["\\ud800"]}}',
        "bad_question",
        "schema",
    ),
    "schema nobody can enforce": (
        '{"question": "A?", "json_schema": {"not": {}}}',
        "bad_question",
        "cannot be enforced",
    ),
    "two forms": ('{"question": "A?", "regex": "a", "choices": ["a"]}', "bad_question", "only one of"),
    "form and stop": ('{"question": "A?", "regex": "a", "stop": "a"}', "bad_question", "ends by itself"),
    "empty stop text": ('{"question": "A?", "stop": [""]}', "bad_question", "stop"),
    "NUL": ('{"question": "A\\u0000?"}', "bad_question", "NUL"),
    "half a character": ('{"question": "A\\ud800?"}', "bad_question", "question: .*unicode"),
    "half a character in the id": ('{"question": "A?", "id": "\\ud800"}', "bad_question", "id: .*unicode"),
    "half a character in the title": ('{"question": "A?", "title": "\\ud800"}', "bad_question", "title: .*unicode"),
    "half a character in a stop text": ('{"question": "A?", "stop": "\\ud800"}', "bad_question", "stop.*unicode"),
}


ONLY_IN_JSON = {"number", "number as id", "number as a choice"}  # in YAML these are text


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in BAD_ENTRIES for kind in ("jsonl", "yaml") if kind == "jsonl" or case not in ONLY_IN_JSON],
)
def test_a_bad_entry_says_what_is_wrong_and_where_and_stops_no_other(case: str, kind: str, tmp_path: Path) -> None:
    entry, code, message = BAD_ENTRIES[case]
    entries = ['{"id": "first", "question": "One?"}', entry, '{"id": "last", "question": "Three?"}']
    dash = "- " if kind == "yaml" else ""

    first, bad, last = load(tmp_path, f"list.{kind}", "\n".join(f"{dash}{line}" for line in entries))

    assert (first.question_id, first.error, last.question_id, last.error) == ("first", None, "last", None)
    assert bad.error_code == code
    assert bad.error is not None
    assert re.search(message, bad.error) and f"list.{kind}, line 2" in bad.error
    assert bad.error.endswith(".") and "\n" not in bad.error
    assert bad.title
    json.dumps(vars(bad), ensure_ascii=False).encode()  # a database takes it


def test_a_forgotten_dash_loses_no_question(tmp_path: Path) -> None:
    _, bad, _ = load(tmp_path, "list.yaml", "- A?\n- question: B?\n  question: C?\n- D?\n")

    assert bad.error == "The question at list.yaml, line 2 has question twice; begin each question with a dash."


def test_ids_stay_distinct_whatever_was_given(tmp_path: Path) -> None:
    ids = ["a", "a", "a#2", "a#5", "a", "q7", None, "b c", "b c", "x\n"]
    lines = [json.dumps({"question": f"Number {index}?", "id": id_}) for index, id_ in enumerate(ids)]

    questions = load(tmp_path, "list.jsonl", "\n".join(lines))

    assert len({question.question_id for question in questions}) == len(ids)
    assert [question.question_id for question in questions if not question.error] == ["a", "q7", "x"]
    assert questions[1].error is not None and "line 2 is already used at list.jsonl, line 1" in questions[1].error


def test_a_question_of_the_command_line_that_is_no_text_is_told_by_its_place() -> None:
    good, bad = load_questions([], ["A?", "B\udce9?"])

    assert good.error is None
    assert bad.error is not None and "question 2 of the command line" in bad.error
    assert bad.text == "B??"


def test_entries_of_several_lines_are_told_by_their_first(tmp_path: Path) -> None:
    table = load(tmp_path, "list.csv", 'question,max_tokens\n\n"A\nB",\n"C\nD",0\n')
    nested = load(tmp_path, "list.yaml", "# remark\nquestions:\n\n  - A\n  -\n    question: B\n    max_tokens: 0\n")

    assert table[1].error is not None and "list.csv, line 5" in table[1].error
    assert nested[1].error is not None and "list.yaml, line 6" in nested[1].error


UNREADABLE = {
    "empty YAML": ("list.yaml", "", None, "a list of questions"),
    "only a remark": ("list.yaml", "# none yet\n", None, "a list of questions"),
    "empty list": ("list.yaml", "[]", None, "no question"),
    "list left out": ("list.yaml", "questions:\n", 1, "a list of questions"),
    "one question, no list": ("list.yaml", "\nquestion: A?", 2, "a list of questions"),
    "text": ("list.yaml", "Who signs?", 1, "a list of questions"),
    "two lists": ("list.yaml", "questions: [A]\nquestions: [B]", 2, "second time"),
    "two files in one": ("list.yaml", "- A?\n---\n- B?", 2, "another document"),
    "unclosed quote": ("list.yaml", "- A?\n- 'B?\n", 3, "unexpected end"),
    "colon in a question": ("list.yaml", "- A?\n- note: B: C\n", 2, "mapping values are not allowed here"),
    "unknown repetition": ("list.yaml", "- A?\n- *b\n", 2, "undefined alias"),
    "endless repetition": ("list.yaml", "- A?\n- &b [*b, *b]\n", 2, "only text may be repeated"),
    "repetition of repetitions": ("list.yaml", "a: &a [x]\nb: &b [*a, *a]\nquestions: [*b]", 2, "only text"),
    "control character": ("list.yaml", "- A?\n- B\0?\n", 2, "character that YAML does not allow"),
    "impossible character": ("list.yaml", '- A?\n- "\\UFFFFFFFF"\n', 2, "number is too large"),
    "huge version": ("list.yaml", "%YAML 1." + "9" * 5000 + "\n---\n- A?\n", 1, "number is too large"),
    "bottomless YAML": ("list.yaml", "[" * 9000, None, "nested too deeply"),
    "empty CSV": ("list.csv", "", None, "no question"),
    "CSV of a heading": ("list.csv", "question,id\n\n,\n", None, "no question"),
    "CSV without a heading": ("list.csv", "\nWho signs?\n", 2, "names the columns"),
    "CSV of semicolons": ("list.csv", "id;question\na;B?", 1, "names the columns"),
    "CSV with two columns of questions": ("list.csv", "question,Question\nA?,B?", 1, "names the columns"),
    "CSV with a comma too many": ("list.csv", "question\nA?\nWhat, if?\n", 3, "more cells than the first"),
    "CSV with an open quote": ("list.csv", 'question\nA?\n"B?\n', 3, "not CSV"),
    "CSV heading with an open quote": ("list.csv", '"question\nA?\n', 1, "not CSV"),
    "CSV with a huge cell": ("list.csv", "question\nA?\n" + "x" * 200_000, 3, "not CSV"),
    "empty JSONL": ("list.jsonl", "\n\n", None, "no question"),
    "broken JSONL": ("list.jsonl", '"A?"\n\n{"question": "B?",}\n', 3, "not JSON"),
    "bottomless JSONL": ("list.jsonl", '"A?"\n' + "[" * 99_000, 2, "not JSON"),
    "endless number": ("list.jsonl", "9" * 9000, 1, "not JSON"),
    "remarks only": ("list.txt", "# none yet\n", None, "no question"),
    "Latin-1": ("list.txt", "Qui décide?".encode("latin-1"), None, "not UTF-8"),
    "UTF-16": ("list.yaml", "- A?".encode("utf-16"), None, "not UTF-8"),
    "another type": ("list.docx", "PK", None, r"read from \.yaml, \.yml, \.csv, \.jsonl, \.xlsx, \.txt"),
    "no workbook": ("list.xlsx", "PK", None, "not an XLSX workbook"),
    "no type": ("list", "A?", None, "read from"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_cannot_be_read_names_file_and_line(case: str, tmp_path: Path) -> None:
    name, content, line, message = UNREADABLE[case]

    with pytest.raises(QuestionFileError, match=message) as caught:
        load(tmp_path, name, content)

    assert caught.value.path == tmp_path / name
    assert caught.value.line == line
    place = f"{tmp_path / name}, line {line}: " if line else f"{tmp_path / name}: "
    assert str(caught.value).startswith(place)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()

    for name, message in {
        "absent.yaml": "does not exist",
        "folder.yaml": "Is a directory",
        "impossible\0.yaml": "cannot be read",
        "n" * 300 + ".csv": "cannot be read",
    }.items():
        with pytest.raises(QuestionFileError, match=message):
            load_questions([tmp_path / name], [])


def test_a_file_name_that_is_no_text_does_no_harm(tmp_path: Path) -> None:
    (bad,) = load(tmp_path, os.fsdecode(b"caf\xe9.yaml"), "- {question: A, id: b c}")

    assert bad.error is not None and "caf?.yaml, line 1" in bad.error


# What the four formats are made of, far oftener than chance would give it.
PIECES = [
    *(
        "- ",
        "\n",
        "\n  ",
        ": ",
        "? ",
        "#",
        "'",
        '"',
        ",",
        "[",
        "]",
        "{",
        "}",
        "|",
        ">",
        "<<",
        "=",
        "~",
        ".",
        "\\",
        "@",
        "`",
    ),
    *("regex", "choices", "json_schema", "json_schema: {type: ", '"json_schema": {"$ref": ', "|"),
    *("question", "questions:", "id", "max_tokens", "stop", "title", "q1", "q1#2", "null", "2025-13-45", "1e999"),
    *("&a ", "*a", "!!int ", "!!python/object:os.system ", "%YAML 1.", "---", "...", "9" * 5000),
    *("\\x", "\\UFFFFFFFF", "\\ud800", "\t", "\0", "\r", "\x85", "\u2028", "\ufeff"),
    *('{"question": "A?"}', '{"question": ', "question,id\n", '"A?",'),
]
contents = st.one_of(
    st.binary(),
    st.text().map(str.encode),
    st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(string.printable)), max_size=60).map(
        lambda pieces: "".join(pieces).encode()
    ),
)


@settings(deadline=None)
@given(contents)
@example(b"- !!int _")
@example(b"- !!timestamp x")
@example(b"- !!bool x")
@example(b"- id: " + b"9" * 5000)
@example(b"- &a {<<: *a}")
@example(b"- ? [a]\n  : b\n  ? [c]\n  : d")
@example(b"- %s%s" % (b"[" * 300, b"]" * 300))
@example(b'%s"question"%s' % (b"[" * 900, b"]" * 900))
@example(b'{"question": %s1%s}' % (b"[" * 900, b"]" * 900))
@example(b'{"question": "A?", "json_schema": %s{}%s}' % (b'{"items": ' * 900, b"}" * 900))
@example(b"- {question: A, json_schema: {minimum: 1e999, const: 00, x: -, enum: [%s]}}" % (b"9" * 5000))
@example(b"- {? %s%s : x}" % (b"[" * 150, b"]" * 150))
def test_whatever_a_file_holds_it_gives_questions_or_says_why_not(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("yaml", "csv", "jsonl", "txt"):
            path = Path(folder) / f"list.{kind}"
            path.write_bytes(content)
            try:
                questions = load_questions([path], [])
            except QuestionFileError as exc:
                assert str(exc)
                continue

            assert questions
            assert len({question.question_id for question in questions}) == len(questions)
            for question in questions:
                stored = json.dumps(vars(question), ensure_ascii=False).encode()
                assert b"\\u0000" not in stored
                assert question.title and (question.error or question.text)
