"""Plots, with matplotlib of the extra `plot`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import PlotNotInstalled
from pipeline.planning.curves import Curve

COLOURS = ("#b45309", "#2563eb", "#15803d")


def plot_curve(curve: Curve, path: Path, *, title: str) -> None:
    """Device-seconds per answer over questions per document, both on logarithmic axes."""
    figure, axes = _figure()
    ways = (
        ("one piece: read again for every question", curve.one_piece_s),
        ("split: read once, stored, loaded", curve.split_s),
        ("read once, shared within the task", curve.shared_s),
    )
    for (label, seconds), colour in zip(ways, COLOURS, strict=True):
        axes.plot(curve.questions, seconds, label=label, color=colour, linewidth=2)
    if curve.split_pays_from is not None:
        at = curve.split_pays_from
        axes.axvline(at, color="#9ca3af", linewidth=1, linestyle=":")
        axes.annotate(
            f"the split pays from {at} questions on",
            (at, 0.03),
            (6, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set(xscale="log", yscale="log", xlabel="questions per document", ylabel="device-seconds per answer")
    ticks = [count for count in (1, 2, 4, 8, 16, 32, 64, 100) if count in curve.questions]
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.minorticks_off()
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def plot_spreads(groups: Mapping[str, Mapping[str, Sequence[float]]], path: Path, *, title: str) -> None:
    """One row of boxes for each quantity, a box for each way; whiskers reach from the least to the most."""
    figure, axes = _figure()
    labels, values = [], []
    for quantity, ways in reversed(list(groups.items())):
        for way, seconds in reversed(list(ways.items())):
            labels.append(f"{quantity}, {way}")
            values.append(list(seconds))
    axes.boxplot(values, orientation="horizontal", whis=(0, 100), tick_labels=labels, widths=0.55)
    axes.set(xlabel="seconds")
    axes.set_xlim(left=0)
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path, dpi=160)


def plot_counts(lines: Mapping[str, Mapping[int, float]], path: Path, *, title: str, x: str, y: str) -> None:
    """A line for each name, over counts on a logarithmic axis; values begin at 0."""
    figure, axes = _figure()
    for (label, values), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(list(values), list(values.values()), label=label, color=colour, linewidth=2, marker="o", markersize=4)
    counts = sorted({count for values in lines.values() for count in values})
    axes.set(xscale="log", xlabel=x, ylabel=y)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise PlotNotInstalled() from exc
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes
