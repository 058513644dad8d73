"""A fake MUSA card (tests/kernels/fake_musa), each time in a process of its own: a device cannot be taken back."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

FACTS = """
import json, logging, sys
import torch
from kernels import flash
from kernels.device import available_devices, pick_device, pick_dtype
from kernels.errors import DeviceUnavailable
from kernels.settings import KernelSettings

class Kept(logging.Handler):
    lines = []
    def emit(self, record):
        self.lines.append(record.getMessage())

logging.getLogger("kernels").addHandler(Kept())
facts = {}
def picked(wanted):
    try:
        device = pick_device(wanted)
        return [str(device), str(pick_dtype("auto", device))]
    except DeviceUnavailable as exc:
        return str(exc)
facts["set"] = picked(KernelSettings().device)
facts["cpu"] = picked("cpu")
facts["found"] = available_devices()
torch.cuda.is_available = lambda: True
facts["beside cuda"] = [picked("auto")[0], picked("cuda")[0]]
if facts["found"][0] == "musa":
    import torch_musa
    q, k, v = (torch.randn(heads, 90, 64, dtype=torch.bfloat16) for heads in (6, 2, 2))
    q, how = q[:, 40:], {"scale": 0.125, "window": 1 << 40, "softcap": None}
    right = flash.plain_attend(q.double(), k.double(), v.double(), **how)
    made = [flash.flash_attend(q.to("musa"), k.to("musa"), v.to("musa"), **how) for _ in range(2)]
    facts["error"] = max(float((a.cpu() - b).abs().max()) for one in made for a, b in zip(one, right))
    facts["device"] = str(made[0].out.device)
    facts["flash calls"] = torch_musa.calls.count(torch_musa.FLASH)
facts["log"] = Kept.lines
print(json.dumps(facts))
"""

CHECK = """
import dataclasses, json, logging
import torch
from kernels import device_check
logging.disable(logging.CRITICAL)
torch.set_num_threads(1)
device_check.DTYPES, device_check.TIMED_RUNS = (torch.bfloat16,), 1
print(json.dumps([dataclasses.asdict(result) for result in device_check.check_device("musa")]))
"""


def on_musa(code: str, *, flash: str = "right", cards: int = 1, device: str = "auto") -> Any:
    environment = {
        "PYTHONPATH": f"{HERE / 'fake_musa'}{os.pathsep}{ROOT}",
        "FAKE_MUSA_FLASH": flash,
        "FAKE_MUSA_CARDS": str(cards),
        "PLATEMAKER_DEVICE": device,
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_musa_card_is_taken_before_cuda_and_its_own_flash_attention_is_used() -> None:
    facts = on_musa(FACTS)

    assert facts["found"] == ["musa", "cpu"]
    assert facts["set"] == ["musa", "torch.bfloat16"]
    assert facts["beside cuda"] == ["musa", "cuda"]
    assert facts["cpu"][0] == "cpu"
    assert facts["device"] == "musa:0"
    assert facts["error"] < 3e-2
    assert facts["flash calls"] == 6  # for the comparison and for each of two prefills, what stands before and itself
    assert facts["log"] == []


@pytest.mark.parametrize(("fault", "calls"), [("missing", 0), ("raises", 1), ("wrong", 2)])
def test_without_a_right_flash_attention_plain_torch_computes_on_the_card(fault: str, calls: int) -> None:
    facts = on_musa(FACTS, flash=fault, device="cpu")

    assert facts["set"][0] == "cpu"  # PLATEMAKER_DEVICE goes before what is there
    assert facts["device"] == "musa:0"
    assert facts["error"] < 3e-2
    assert facts["flash calls"] == calls  # it is not asked again
    assert len(facts["log"]) == 1
    assert "prefill does without the device's flash attention" in facts["log"][0]


def test_torch_musa_without_a_card_is_said_in_one_sentence() -> None:
    facts = on_musa(FACTS, cards=0, device="musa:0")

    assert facts["found"] == ["cpu"]
    assert "it sees no card" in facts["set"]
    assert "\n" not in facts["set"]


def test_every_op_of_the_engine_runs_on_the_card_and_a_wrong_flash_attention_is_the_only_one_that_fails() -> None:
    results = on_musa(CHECK, flash="wrong")

    failed = [result["op"] for result in results if result["state"] == "failed"]
    assert failed == ["prefill with log-sum-exp"]
    assert {"shared prefix", "model: norm, rotary, steps", "codec int4", "the same, pinned", "sampling"} <= {
        result["op"] for result in results if result["state"] == "ok"
    }
