"""How the library is built, kept and, where it cannot be, done without."""

import logging
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.backend import pick_backend
from kernels.native import build
from kernels.native.build import BuildFailed
from kernels.native.library import Library

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pick_backend.cache_clear()
    yield tmp_path / "platemaker" / "native"
    pick_backend.cache_clear()


def test_a_cpu_computes_in_native_code_where_there_is_a_compiler(
    compiler: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert pick_backend(CPU, 64, torch.float32).name == "native"
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    assert not caplog.messages


def test_a_library_is_built_once(compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.build(cache)
    made = first.stat().st_mtime_ns

    assert build.build(cache) == first
    assert first.stat().st_mtime_ns == made


def test_another_source_compiler_flag_or_cpu_is_another_library(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {build._key([compiler])}
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
        names.add(build._key([compiler]))
    with monkeypatch.context() as patch:
        patch.setattr(build, "_cpu", lambda: b"another")
        names.add(build._key([compiler]))
    with monkeypatch.context() as patch:
        (tmp_path / "attention.cpp").write_text("int x;")
        patch.setattr(build, "SOURCES", (tmp_path / "attention.cpp", *build.SOURCES[1:]))
        names.add(build._key([compiler]))

    assert len(names) == 4


def test_processes_that_build_at_once_all_get_a_whole_library(compiler: str, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        found = pool.map(_build_and_load, [cache, cache])

    assert len(set(found)) == 1
    assert len(list(cache.iterdir())) == 1


def _build_and_load(cache: Path) -> Path:
    path = build.build(cache)
    Library(path)
    return path


def test_a_library_that_is_cut_off_is_built_again(compiler: str, cache: Path) -> None:
    path = build.build(cache)
    path.write_bytes(path.read_bytes()[:100])

    assert pick_backend(CPU, 64, torch.float32).name == "native"


@pytest.mark.parametrize("fault", ["no compiler", "a compiler that fails", "a cache that cannot be written"])
def test_where_nothing_can_be_built_plain_torch_computes_and_one_line_says_why(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif fault == "a compiler that fails":
        monkeypatch.setenv("CXX", "false")
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    with caplog.at_level(logging.WARNING):
        found = [pick_backend(CPU, 64, torch.float32).name for _ in range(2)]

    assert found == ["torch", "torch"]
    assert len(caplog.messages) == 1
    assert "plain torch" in caplog.messages[0]


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("exp2.h", "0.6931470036506653f", "0.68f"),
        ("attention_parts.h", "LN2 = 0.69", "LN2 = 0.68"),
        ("attention_parts.h", "(position < high", "(position <= high"),
    ],
)
def test_a_library_that_computes_wrongly_is_refused(
    file: str,
    right: str,
    wrong: str,
    compiler: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = (build.FOLDER / file).read_text()
    assert source.count(right) == 1
    for path in (*build.SOURCES, *build.HEADERS):  # a header beside the source goes before another of its name
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(source.replace(right, wrong))
    monkeypatch.setattr(build, "SOURCES", tuple(tmp_path / path.name for path in build.SOURCES))

    with caplog.at_level(logging.WARNING):
        found = pick_backend(CPU, 64, torch.float32)

    assert found.name == "torch"
    assert len(caplog.messages) == 1
    assert "off by" in caplog.messages[0]


def test_what_a_compiler_says_is_in_the_error(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attention.cpp").write_text("nonsense")
    monkeypatch.setattr(build, "SOURCES", (tmp_path / "attention.cpp", *build.SOURCES[1:]))

    with pytest.raises(BuildFailed, match="nonsense"):
        build.build(tmp_path)
