"""`plan`: how many devices a night takes."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pipeline.commands.options import Json

if TYPE_CHECKING:
    from pipeline.planning.workload import Workload


def plan(
    contracts: Annotated[int, typer.Option(min=1, help="Documents a night.")] = 1000,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each.")] = 40,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a document (tokens).")] = 20_000,
    folder: Annotated[Path | None, typer.Option(help="Take the lengths from the files of this folder.")] = None,
    histogram: Annotated[Path | None, typer.Option(help="Take them from a CSV: tokens,documents.")] = None,
    window: Annotated[str, typer.Option(metavar="DURATION", help="Time there is.")] = "8h",
    prefill_device: Annotated[str, typer.Option(help="Profile of the devices that read.")] = "mtt-s5000",
    decode_device: Annotated[str | None, typer.Option(help="Of those that answer. Default: the same.")] = None,
    prefill_workers: Annotated[int | None, typer.Option(min=0, help="How many; 0: one pool does both.")] = None,
    decode_workers: Annotated[int | None, typer.Option(min=1, help="Default: the cheapest mix is searched.")] = None,
    model: Annotated[str, typer.Option(help="Model of a device that was not measured.")] = "qwen2.5-7b",
    question_tokens: Annotated[int, typer.Option(min=1, help="Length of a question.")] = 24,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer.")] = 48,
    store_gb_per_s: Annotated[float, typer.Option(min=0.001, help="What the store moves for all workers.")] = 10.0,
    worker_gb_per_s: Annotated[float, typer.Option(min=0.001, help="What one worker moves.")] = 2.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Questions that a worker answers at once.")] = 32,
    profiles: Annotated[Path | None, typer.Option(help="A TOML file with devices of your own.")] = None,
    measure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure this machine and its model into FILE, and end.")
    ] = None,
    name: Annotated[str, typer.Option(help="What the measured device is called.")] = "here",
    at_once: Annotated[int, typer.Option(min=1, help="Workers that share this machine; all measure together.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw cost per answer by questions (.png or .svg).")] = None,
    json_output: Json = False,
) -> None:
    """Say how many workers finish a night's contracts in time, when, and at what cost; or measure this machine."""
    console = Console(stderr=json_output)
    if measure is not None:
        _measure(measure, name, at_once, console)
        return
    from pipeline.planning.curves import cost_curve
    from pipeline.planning.fast import plan_fast
    from pipeline.planning.mix import cheapest
    from pipeline.planning.profiles import load_profiles
    from pipeline.planning.report import print_plan
    from pipeline.planning.service import Cluster
    from pipeline.settings import PipelineSettings
    from pipeline.times import parse_duration

    if (prefill_workers is None) != (decode_workers is None):
        raise typer.BadParameter("give both --prefill-workers and --decode-workers, or neither.")
    window_s = parse_duration(window)
    known = load_profiles(profiles)
    price = PipelineSettings().price_per_device_hour
    reading, answering = (
        replace(device, price_per_hour=price if device.price_per_hour is None else device.price_per_hour)
        for device in (
            known.device(prefill_device, model),
            known.device(decode_device or prefill_device, model),
        )
    )
    work = _workload(contracts, questions, tokens, folder, histogram, question_tokens, output_tokens)
    cluster = Cluster(
        reading, answering, prefill_workers or 0, decode_workers or 1, store_gb_per_s * 1e9, worker_gb_per_s * 1e9,
        max_batch,
    )  # fmt: skip
    if decode_workers is None:
        mix = cheapest(cluster, work, window_s)
        cluster, found = mix.cluster, mix.outcome
    else:
        found = plan_fast(cluster, work)
    curve = cost_curve(
        answering,
        tokens=float(work.tokens.mean()),
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        bytes_per_s=cluster.bytes_per_s,
    )
    if plot is not None:
        from pipeline.insight.plots import plot_curve

        plot_curve(curve, plot, title=f"{float(work.tokens.mean()):,.0f} tokens a document, {answering.name}")
    if json_output:
        record = {
            "prefill_workers": cluster.prefill_workers,
            "decode_workers": cluster.decode_workers,
            "window_s": window_s,
            "meets_window": found.finish_s <= window_s,
            **asdict(found),
            "curve": asdict(curve),
            "split_pays_from": curve.split_pays_from,
        }
        typer.echo(json.dumps(record))
    else:
        print_plan(console, cluster, work, found, curve, window_s)


def _workload(
    contracts: int, questions: int, tokens: int, folder: Path | None, histogram: Path | None, question_tokens: int,
    output_tokens: int,
) -> "Workload":  # fmt: skip
    from pipeline.planning.workload import Workload, draw_lengths, read_histogram

    lengths: list[float] = [tokens]
    weights: list[float] | None = None
    if folder is not None:
        from pipeline.planning.folder import folder_lengths

        lengths = folder_lengths(folder)
    elif histogram is not None:
        lengths, weights = read_histogram(histogram)
    return Workload(draw_lengths(lengths, weights, contracts), questions, question_tokens, output_tokens)


def _measure(path: Path, name: str, at_once: int, console: Console) -> None:
    from kernels.settings import KernelSettings
    from pipeline.planning.measure import measure_device, write_profile
    from storage.settings import StorageSettings
    from tasks.engine import Engine

    def tell(text: str) -> None:
        console.print(text, style="dim")

    device = measure_device(Engine(KernelSettings()), StorageSettings(), name, tell, at_once=at_once)
    write_profile(device, path)
    console.print(f"{path} holds the device {name}. Plan with --profiles {path} --prefill-device {name}.")
