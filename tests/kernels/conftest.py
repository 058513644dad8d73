"""Tiny random models, and the seed they and their inputs come from: fresh in every run, shown with every failure."""

import os
import secrets
import shutil
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from kernels.model import LanguageModel, prepare_model
from kernels.native.backend import NativeBackend
from kernels.native.build import COMPILERS, build
from kernels.native.library import Library
from tests.kernels.families import random_model

SEED = int(os.environ.get("TEST_SEED") or secrets.randbits(31))
CPU = torch.device("cpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections.append(("random inputs", f"the same again with TEST_SEED={SEED}"))
    return report


@pytest.fixture(scope="session")
def seed() -> int:
    return SEED


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models spend more time on handing work to threads than on the work."""
    torch.set_num_threads(1)


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def compiler() -> str:
    found = [path for name in COMPILERS if (path := shutil.which(name))]
    if not found:
        pytest.skip("there is no C++ compiler; the product then runs in plain torch")
    return found[0]


@pytest.fixture(scope="session")
def native(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> NativeBackend:
    return NativeBackend(Library(build(tmp_path_factory.mktemp("native"))))


@pytest.fixture(scope="session")
def build_model(seed: int) -> Callable[[PreTrainedConfig], PreTrainedModel]:
    return lambda config: random_model(config, seed)


@pytest.fixture(scope="module")
def tiny_llama(build_model: Callable[[PreTrainedConfig], PreTrainedModel]) -> LanguageModel:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return prepare_model(build_model(config), CPU, 256)
