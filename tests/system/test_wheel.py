"""The wheel holds everything, and its package `kernels` does not disturb transformers."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOAD_AND_RUN = """
import sys
from pathlib import Path
import kernels
assert Path(kernels.__file__).is_relative_to(sys.argv[2]), kernels.__file__
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()
from kernels.settings import KernelSettings
from kernels.model import load_model
load_model(Path(sys.argv[1]), KernelSettings())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, source],
        check=True,
        capture_output=True,
    )
    return next(target.glob("*.whl"))


def test_the_wheel_holds_every_package_and_the_samples(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())

    wanted = {
        str(path.relative_to(ROOT))
        for floor in ("pipeline", "tasks", "kernels", "storage", "migrations")
        for path in (ROOT / floor).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= held, f"missing: {sorted(wanted - held)}"
    assert not any(name.startswith(("tests/", "scripts/")) for name in held)


@pytest.mark.parametrize("installed", ["from the repository's root", "from the installed wheel"])
def test_transformers_loads_a_model_beside_our_kernels(
    wheel: Path, tmp_path: Path, tiny_model: Path, installed: str
) -> None:
    place = ROOT
    if "wheel" in installed:
        place = tmp_path / "site"
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", place, wheel]
        subprocess.run(install, check=True, capture_output=True)

    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_RUN, tiny_model, place],
        cwd=place if place == ROOT else tmp_path,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
