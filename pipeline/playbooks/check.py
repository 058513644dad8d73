"""Everything that is wrong with playbooks, at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import QuestionFileError
from pipeline.questions import Problem, Question, load_question_set


@dataclass(frozen=True)
class Checked:
    questions: list[Question]
    problems: list[Problem]


def check_playbooks(names: Iterable[Path], values: Mapping[str, str]) -> Checked:
    """Reads the playbooks as one set. A file that cannot be read is a problem like any other."""
    readable, problems = [], []
    for name in names:
        try:
            load_question_set([name], [], values)
        except QuestionFileError as exc:
            problems += [Problem(str(fault), fault.path, fault.line) for fault in (exc, *exc.others)]
        else:
            readable.append(name)
    found = load_question_set(readable, [], values)
    unused = [Problem(f"No question uses {{{name}}}; leave out its --set") for name in found.unused]
    return Checked(found.questions, [*problems, *found.problems, *(unused if not problems else ())])
