"""A short storm, as scripts/chaos makes long ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parents[2] / "scripts" / "chaos"


@pytest.mark.parametrize("faults", [("kill", "broker-flush", "stop")], ids=" ".join)
def test_a_short_storm_loses_nothing_and_changes_no_answer(tmp_path: Path, faults: tuple[str, ...]) -> None:
    size = {"--documents": 4, "--questions": 6, "--characters": 3000, "--seconds": 12, "--every": 4, "--lease": 4}
    options = [str(part) for pair in size.items() for part in pair]

    done = subprocess.run(
        [sys.executable, CHAOS, "--json", *options, "--data", tmp_path, "--faults", *faults],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads(done.stdout.splitlines()[-1])
    assert (totals["rows"], totals["faults"]) == (24, 3)
    for name in (
        "lost",
        "failed",
        "duplicated",
        "differing",
        "half_made",
        "leases_left",
        "multiparts_left",
        "bad_ends",
    ):
        assert totals[name] == 0, name
