"""`advise` and `baseline`: does the split pay, by what was measured here."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipeline.commands.opening import opened
from pipeline.commands.options import Json, QuestionOptions, taking
from pipeline.exits import Exit


def advise(
    folder: Annotated[Path | None, typer.Argument(help="Documents to advise on.", show_default=False)] = None,
    questions: Annotated[list[Path], typer.Option(help="Question file. May be repeated.")] = [],  # noqa: B006 # typer copies it
    jobs: Annotated[float, typer.Option(min=1, help="How many jobs will ask each document.")] = 1.0,
    history: Annotated[bool, typer.Option("--history", help="Advise on what was asked so far instead.")] = False,
    profile: Annotated[str, typer.Option(help="Device to assume where nothing was read here yet.")] = "cpu",
    model: Annotated[str, typer.Option(help="Model of that device.")] = "smollm2-135m",
    json_output: Json = False,
) -> None:
    """Say for each group of documents whether to read in one piece, share, or split, and why."""
    from kernels.settings import KernelSettings
    from pipeline.insight.advise import Asked, probe_store
    from pipeline.insight.advise import advise as advice
    from pipeline.planning.folder import folder_lengths
    from pipeline.planning.profiles import load_profiles
    from pipeline.questions import load_questions
    from storage.break_even import SplitRates
    from storage.history import asked_documents, snapshot_bytes_per_token
    from storage.rates import measured_rates

    if history == (folder is not None):
        raise typer.BadParameter("give a FOLDER with --questions, or --history.")
    asked: list[Asked] = []
    if folder is not None:
        count = sum(question.error is None for question in load_questions(questions, []))
        if not count:
            raise typer.BadParameter("no question: give --questions FILE.")
        asked = [Asked(tokens, count, jobs) for tokens in folder_lengths(folder)]
    name = KernelSettings().model_name
    with opened() as (database, store, settings):
        with database.reading() as session:
            if history:
                found = asked_documents(session, settings.tenant, name)
                asked = [Asked(each.num_tokens, each.questions / each.jobs, each.jobs) for each in found]
            rates = measured_rates(session, settings.tenant, name)
            per_token = snapshot_bytes_per_token(session, settings.tenant, name)
        put, get = probe_store(store)
    device = load_profiles().device(profile, model)
    here = rates.prefill_tokens_per_s is not None and per_token is not None
    measured = SplitRates(
        rates.prefill_tokens_per_s or 1 / device.prefill_s_per_token, put, get, per_token or device.kv_bytes_per_token
    )
    lines = advice(asked, measured)
    if json_output:
        record = {"measured_here": here, "rates": vars(measured), "groups": [line.record() for line in lines]}
        typer.echo(json.dumps(record))
        return
    console = Console()
    console.print(
        f"Reading {measured.prefill_tokens_per_s:,.0f} tokens/s and {measured.kv_bytes_per_token:,.0f} bytes a token "
        f"({'measured here' if here else f'assumed: {profile} with {model}; nothing was read here yet'}); "
        f"store {put / 1e6:,.0f} MB/s put, {get / 1e6:,.0f} MB/s get (measured now)",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("documents", "tokens", "asked", "pays from", "way", box=None, pad_edge=False, header_style="bold")
    for line in lines:
        table.add_row(
            f"{line.documents:,} {line.group}",
            f"{line.tokens:,.0f}",
            f"{line.questions_per_job:,.0f} × {line.jobs:,.1f}",
            "–" if line.break_even is None else f"{line.break_even:,}",
            line.recommendation,
        )
    console.print(table)
    for line in lines:
        console.print(f"{line.group}: {line.reason}.", highlight=False, soft_wrap=True)
    if not lines:
        console.print("No document was asked yet; give a FOLDER with --questions.")


@taking(QuestionOptions)
def baseline(
    asking: QuestionOptions,
    *,
    file: Annotated[Path, typer.Argument(help="The document.", show_default=False)],
    runs: Annotated[int, typer.Option(min=1, help="How often each way is measured.")] = 20,
    out: Annotated[Path, typer.Option(help="Where the numbers go (JSON).")] = Path("baseline.json"),
    against: Annotated[Path | None, typer.Option(help="An earlier file to compare with.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw both ways (.png or .svg).")] = None,
    json_output: Json = False,
) -> None:
    """Measure one document read in one piece for every question, then split; compare times and answers."""
    asked = [question for question in asking.load() if question.error is None]
    from kernels.settings import KernelSettings
    from pipeline.documents import read_document
    from pipeline.errors import PlanError
    from pipeline.insight.baseline import measure_baseline
    from pipeline.insight.baseline_table import print_baseline, print_change
    from pipeline.settings import PipelineSettings
    from tasks.engine import Engine

    before = None
    if against is not None:
        try:
            before = json.loads(against.read_text("utf-8"))
            _ = before["one_piece"]["total_s"], before["split"]["total_s"]
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise PlanError(f"{against} is no baseline; give a file that an earlier run wrote") from exc
    document = read_document(file, limits=PipelineSettings().parse_limits)
    console = Console(stderr=json_output)
    with console.status("Preparing") as status:
        found = measure_baseline(
            Engine(KernelSettings()),
            document.text,
            [question.text for question in asked],
            asking.params(),
            runs=runs,
            tell=status.update,
        )
    record = found.record()
    out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    if plot is not None:
        from pipeline.insight.plots import plot_spreads

        ways = {"one piece": found.one_piece, "split": found.split}
        groups = {
            "prefill": {name: way.prefill_s for name, way in ways.items()},
            "first token": {name: way.first_token_s for name, way in ways.items()},
            "total": {name: way.total_s for name, way in ways.items()},
        }
        plot_spreads(groups, plot, title=f"{found.document_tokens:,} tokens, {found.questions:,} questions")
    if json_output:
        typer.echo(json.dumps(record))
    else:
        print_baseline(console, found)
        if before is not None:
            print_change(console, found, before)
    if found.dtype == "float32" and found.equal_answers < found.questions:
        raise typer.Exit(Exit.INCOMPLETE)
