from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from kernels import device
from kernels.device import available_devices, pick_device, pick_dtype, set_threads
from kernels.errors import DeviceUnavailable
from kernels.settings import KernelSettings


@pytest.fixture(autouse=True)
def only_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(torch, "musa", raising=False)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda _name: None)


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def with_musa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "musa", SimpleNamespace(is_available=lambda: True), raising=False)


def test_auto_is_the_cpu_where_there_is_nothing_else() -> None:
    assert available_devices() == ("cpu",)
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.usefixtures("with_cuda", "with_musa")
def test_musa_comes_before_cuda_and_cuda_before_the_cpu() -> None:
    assert available_devices() == ("musa", "cuda", "cpu")


@pytest.mark.usefixtures("with_cuda")
def test_a_card_can_be_named_and_the_cpu_asked_for() -> None:
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["cuda", "musa", "cuda:1", "toaster", "", "cpu:one"])
def test_a_device_that_is_not_there_is_refused_with_what_is_there(wanted: str) -> None:
    with pytest.raises(DeviceUnavailable, match="found: cpu") as caught:
        pick_device(wanted)

    assert caught.value.wanted == wanted
    assert caught.value.found == ("cpu",)
    assert "PLATEMAKER_DEVICE" in str(caught.value)


@pytest.mark.parametrize(("fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_only_where_the_cpu_is_fast_at_it(
    fast: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_is_fast_at_bf16", lambda: fast)

    assert pick_dtype("auto", torch.device("cpu")) == expected
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_type_that_is_asked_for_is_taken(name: str) -> None:
    assert pick_dtype(name, torch.device("cpu")) == getattr(torch, name)


def test_threads_are_as_many_as_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        set_threads(1)
        assert torch.get_num_threads() == 1
        set_threads(0)
        assert torch.get_num_threads() >= 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int4"), ("threads", "-1"), ("chunk_tokens", "8"), ("max_batch", "0"), ("max_batch", "many")],
)
def test_a_wrong_setting_stops_the_start_and_is_named(field: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PLATEMAKER_{field.upper()}", value)

    with pytest.raises(ValidationError) as caught:
        KernelSettings()

    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("/srv/models/contracts-7b", "contracts-7b"),
        ("./models/contracts-7b", "contracts-7b"),
        ("~/small.gguf", "small.gguf"),
    ],
)
def test_a_model_is_called_by_its_hub_id_or_the_last_part_of_its_path(model: str, name: str) -> None:
    assert KernelSettings(model=model).model_name == name


@pytest.mark.parametrize(("installed", "reason"), [(False, "torch_musa is not installed"), (True, "it sees no card")])
def test_a_musa_card_that_is_not_there_is_refused_with_the_reason(
    installed: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(device.importlib, "import_module", lambda name: None)

    with pytest.raises(DeviceUnavailable, match=reason):
        pick_device(KernelSettings(device="musa").device)
