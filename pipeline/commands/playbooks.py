"""Looking at playbooks before they are asked."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.commands.options import SET_HELP, Json, variables
from pipeline.exits import Exit

if TYPE_CHECKING:
    from pipeline.questions import Problem, Question

playbook = typer.Typer(no_args_is_help=True, help="Question sets: check them, look at them, list the built-in ones.")

Names = Annotated[list[Path], typer.Argument(help="Files, or names of built-in playbooks.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)]


@playbook.command()
def check(names: Names, set_: Set = None, json_output: Json = False) -> None:
    """Say everything that is wrong with playbooks, with lines; nothing is asked."""
    from pipeline.playbooks.check import check_playbooks

    checked = check_playbooks(names, variables(set_ or []))
    if json_output:
        problems = [_problem_record(problem) for problem in checked.problems]
        typer.echo(json.dumps({"questions": len(checked.questions), "problems": problems}))
    else:
        console = Console()
        for problem in checked.problems:
            console.print(Text(_where(problem), style="bold") + Text(problem.sentence), soft_wrap=True)
        bad = len(checked.problems)
        what = f"{bad} problem{'' if bad == 1 else 's'}" if bad else "no problem"
        console.print(f"{len(checked.questions)} questions, {what}.", style="red" if bad else "green", highlight=False)
    raise typer.Exit(Exit.USAGE if checked.problems else Exit.OK)


@playbook.command()
def show(
    names: Names,
    set_: Set = None,
    prompts: Annotated[bool, typer.Option("--prompts", help="Show what the model is asked, word for word.")] = False,
    json_output: Json = False,
) -> None:
    """Show the questions of playbooks, includes and variables filled in."""
    from pipeline.questions import load_question_set

    found = load_question_set(names, [], variables(set_ or []))
    if json_output:
        for question in found.questions:
            typer.echo(json.dumps(_record(question)))
        return
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, expand=console.is_terminal, show_edge=False)
    table.add_column("Id", overflow="fold", ratio=3)
    table.add_column("Title", ratio=3)
    table.add_column("Answer", no_wrap=True)
    table.add_column("Prompt" if prompts else "Question", ratio=8)
    table.add_column("Tokens", justify="right", no_wrap=True)
    for question in found.questions:
        asked = Text(question.text if prompts else question.asked or question.text)
        if not prompts and question.guidance:
            asked.append(f"\n{question.guidance}", style="dim")
        if question.error:
            asked = Text(question.error, style="red")
        tokens = "" if question.max_tokens is None else str(question.max_tokens)
        kind = question.answer_type.replace("_", "/") + (" + quote" if question.quote else "")
        table.add_row(Text(question.question_id), Text(question.title), kind, asked, tokens)
    console.print(table)
    console.print(f"{len(found.questions)} questions", style="dim", highlight=False)


@playbook.command(name="list")
def list_built_in(json_output: Json = False) -> None:
    """List the playbooks that ship with Platemaker."""
    from pipeline.playbooks.library import built_in_names, playbook_path
    from pipeline.question_files import read_file

    for name in built_in_names():
        file = read_file(playbook_path(Path(name)))
        if json_output:
            typer.echo(json.dumps({"name": name, "title": file.title, "questions": len(file.entries)}))
        else:
            typer.echo(f"{name:8} {file.title}")


def _where(problem: "Problem") -> str:
    if problem.line is None:
        return ""
    column = f":{problem.column}" if problem.column else ""
    return f"{problem.path.name if problem.path else ''}:{problem.line}{column}  "


def _problem_record(problem: "Problem") -> dict[str, object]:
    return {
        "file": str(problem.path) if problem.path else None,
        "line": problem.line,
        "column": problem.column,
        "problem": problem.sentence,
    }


def _record(question: "Question") -> dict[str, object]:
    return {
        "id": question.question_id,
        "title": question.title,
        "question": question.asked or question.text,
        "type": question.answer_type.value,
        "choices": list(question.choices),
        "guidance": question.guidance,
        "quote": question.quote,
        "max_tokens": question.max_tokens,
        "stop": list(question.stop),
        "prompt": question.text,
        "error": question.error,
    }
