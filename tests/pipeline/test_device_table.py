import io
import json
import sys

import pytest
from rich.console import Console

from kernels import device_check
from kernels.device_check import OpResult
from pipeline.cli import main
from pipeline.device_table import show_device_check

RIGHT = OpResult("shared prefix", "float32", "native", "ok", 3e-7, 1e-4, 1.25)
WRONG = OpResult("sinks", "bfloat16", "torch", "failed", float("nan"), 3e-2, 2.0, "its numbers are too far off")
ABSENT = OpResult("prefill", "float16", "flash", "unavailable", None, 5e-3, None, "no such operator")


def shown(monkeypatch: pytest.MonkeyPatch, *results: OpResult, json_output: bool) -> tuple[bool, str]:
    monkeypatch.setattr(device_check, "check_device", lambda _wanted: iter(results))
    console = Console(file=io.StringIO(), width=60)
    passed = show_device_check("cpu", console=console, json_output=json_output)
    assert isinstance(console.file, io.StringIO)
    return passed, console.file.getvalue()


def test_each_op_has_a_line_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    passed, text = shown(monkeypatch, RIGHT, WRONG, ABSENT, json_output=False)

    lines = text.splitlines()
    assert not passed
    assert len(lines) == 6
    assert "3.0e-07" in lines[2]
    assert lines[3].endswith("failed: its numbers are too far off")
    assert lines[4].endswith("unavailable: no such operator")
    assert lines[5] == "1 ok, 1 failed, 1 unavailable"


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    passed, text = shown(monkeypatch, RIGHT, ABSENT, json_output=True)

    found = json.loads(text)
    assert passed
    assert found["passed"]
    assert [op["op"] for op in found["ops"]] == ["shared prefix", "prefill"]
    assert found["device"] == "cpu"


@pytest.mark.parametrize(("results", "code"), [([RIGHT, ABSENT], 0), ([RIGHT, WRONG], 4)])
def test_the_exit_code_says_whether_something_failed(
    results: list[OpResult], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "check_device", lambda _wanted: iter(results))
    monkeypatch.setattr(sys, "argv", ["platemaker", "doctor", "--device", "cpu"])

    with pytest.raises(SystemExit) as caught:
        main()

    assert caught.value.code == code


def test_a_device_that_is_not_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["platemaker", "doctor", "--device", "toaster"])

    with pytest.raises(SystemExit) as caught:
        main()

    assert caught.value.code == 4
    assert capsys.readouterr().err.count("\n") == 1
