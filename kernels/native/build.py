"""Builds the C++ with this machine's compiler for this machine's CPU, once."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(FOLDER.glob("*.cpp")))
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
COMPILERS = ("g++", "c++", "clang++")  # clang keeps too few sums in the 16 registers of AVX2: right, but half as fast
CPU_FLAG = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# Not -ffast-math: NaN and infinity mean something here.
FLAGS = ("-std=c++17", "-O3", CPU_FLAG, "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", f"-I{FOLDER}")
TIMEOUT_S = 300


class BuildFailed(Exception):
    """There is no compiler, or it could not build the library; the caller computes in another way."""


def build(folder: Path) -> Path:
    """The shared library, from `folder` where it has been built before. Many processes may build at once: each writes a
    file of its own, and the last to rename it wins.

    Raises:
        BuildFailed
    """
    compiler = _compiler()
    library = folder / f"native-{_key(compiler)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as place:
            made = Path(place) / library.name
            _run([*compiler, *FLAGS, *map(str, SOURCES), "-o", str(made)])
            made.replace(library)
    except OSError as exc:
        raise BuildFailed(f"{folder} cannot be written: {exc}") from exc
    return library


def _compiler() -> list[str]:
    """$CXX, which may hold arguments (`ccache g++`), or the first of COMPILERS."""
    chosen = os.environ.get("CXX", "").split()
    names = [chosen] if chosen else [[name] for name in COMPILERS]
    for name, *arguments in names:
        if path := shutil.which(name):
            return [path, *arguments]
    raise BuildFailed("there is no C++ compiler (install g++, or set CXX)")


def _key(compiler: list[str]) -> str:
    """Of all that the library's code depends on."""
    digest = hashlib.sha256()
    sources = [source.read_bytes() for source in (*SOURCES, *HEADERS)]
    for part in (*sources, " ".join([*compiler, *FLAGS]).encode(), _run([*compiler, "--version"]), _cpu()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def _cpu() -> bytes:
    """What tells CPUs apart for the compiler; a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    named = (b"flags", b"Features", b"model name", b"CPU part")
    return platform.machine().encode() + b"\n".join(sorted({line for line in lines if line.startswith(named)}))


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise BuildFailed(f"{command[0]} could not be run: {exc}") from exc
    if done.returncode:
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if "error" in line]
        raise BuildFailed(f"{command[0]} failed: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout
