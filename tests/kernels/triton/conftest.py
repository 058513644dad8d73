"""Where the kernels run: in Triton's interpreter on the CPU, or with TRITON_INTERPRET=0 on a CUDA card."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if os.environ["TRITON_INTERPRET"] != "0":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("TRITON_INTERPRET=0 needs a CUDA card")
    return torch.device("cuda")
