"""What `platemaker doctor --device` prints: each op the engine needs, as it is done on that device."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from kernels.device_check import OpResult

STYLES = {"ok": "green", "failed": "bold red", "unavailable": "yellow"}
HEADINGS = ("op", "type", "by", "error", "allowed", "ms", "")
WIDTHS = (26, 8, 6, -7, -7, -7)  # negative: to the right


def show_device_check(wanted: str, *, console: Console, json_output: bool) -> bool:
    """Runs the check and prints it, as a table or as one object. Whether nothing failed.

    Raises:
        DeviceUnavailable: the device is not there.
    """
    import torch  # here: only this command needs it

    from kernels.device import pick_device, set_threads
    from kernels.device_check import check_device, describe_device
    from kernels.settings import KernelSettings

    set_threads(KernelSettings().threads)
    device = pick_device(wanted)
    name = describe_device(device)
    results: list[OpResult] = []
    if json_output:
        results += check_device(wanted)
        found = {
            "device": str(device),
            "name": name,
            "torch": torch.__version__,
            "passed": _passed(results),
            "ops": [vars(result) for result in results],
        }
        console.file.write(json.dumps(found) + "\n")
        return _passed(results)
    console.print(Text(f"{device}: {name}, torch {torch.__version__}", style="bold"))
    console.print(_line(HEADINGS, ""), style="dim", soft_wrap=True)
    for result in check_device(wanted):  # line by line: it stays on the screen if the driver kills us
        results.append(result)
        console.print(_row(result), soft_wrap=True)
    counts = Counter[str](result.state for result in results)
    console.print(", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state]), highlight=False)
    return _passed(results)


def _passed(results: "list[OpResult]") -> bool:
    return all(result.state != "failed" for result in results)


def _row(result: "OpResult") -> Text:
    error = "" if result.error is None else f"{result.error:.1e}"
    ms = "" if result.ms is None else f"{result.ms:.1f}"
    cells = (result.op, result.dtype, result.implementation, error, f"{result.tolerance:g}", ms, result.state)
    return _line(cells, STYLES[result.state], detail=result.detail)


def _line(cells: Sequence[str], style: str, *, detail: str = "") -> Text:
    line = Text()
    for cell, width in zip(cells[:-1], WIDTHS, strict=True):
        line.append(cell.rjust(-width) if width < 0 else cell.ljust(width)).append("  ")
    return line.append(cells[-1], style=style).append(f": {detail}" if detail else "")
