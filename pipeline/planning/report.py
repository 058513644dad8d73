"""A plan for a person."""

from rich.console import Console

from pipeline.planning.curves import Curve
from pipeline.planning.outcome import Outcome
from pipeline.planning.service import Cluster
from pipeline.planning.workload import Workload
from pipeline.words import duration


def print_plan(
    console: Console, cluster: Cluster, work: Workload, found: Outcome, curve: Curve, window_s: float
) -> None:
    """What to set up, when it is done, what it costs, and whether the split pays."""
    both = cluster.prefill_workers == 0
    workers = f"{cluster.decode_workers:,} × {cluster.decode.name}"
    if both:
        workers += ", each reads and answers (`platemaker worker all`)"
    else:
        workers = f"{cluster.prefill_workers:,} × {cluster.prefill.name} for prefill, {workers} for decode"
    late = "" if found.finish_s <= window_s else f"; the window of {duration(window_s)} is too short"
    unit = " device-hours" if found.cost_is_device_hours else ""
    busy = f"{found.decode_busy:.0%}" if both else f"prefill {found.prefill_busy:.0%}, decode {found.decode_busy:.0%}"
    pays = curve.split_pays_from
    split = f"from {pays} questions a document on" if pays else "not even with 100 questions a document"
    derived = sorted({each.name for each in (cluster.prefill, cluster.decode) if each.origin == "derived"})
    lines = [
        ("Work", f"{work.documents:,} documents × {work.questions:,} questions = {work.answers:,} answers"),
        ("Workers", workers),
        ("Done", f"after {duration(found.finish_s)}; half after {duration(found.p50_s)}, "
                 f"95 % after {duration(found.p95_s)}{late}"),
        ("Busy", busy),
        ("Cost", f"{found.cost:,.2f}{unit}; a thousand answers {found.cost_per_1000_answers:,.4f}{unit}"),
        ("Split", f"costs less than reading again for every question {split}"),
    ]  # fmt: skip
    for name, text in lines:
        console.print(f"{name:9}{text}", highlight=False, soft_wrap=True)
    if derived:
        console.print(
            f"Rates of {', '.join(derived)} are derived from published figures, not measured: see docs/planning.md.",
            style="yellow", highlight=False, soft_wrap=True,
        )  # fmt: skip
