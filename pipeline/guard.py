"""Refuses an environment in which another package is imported as `kernels`."""

import importlib.metadata
import importlib.util
from pathlib import Path

import kernels
from kernels.errors import KernelError


class OtherKernelsError(KernelError):
    """Another package named 'kernels' is installed in this environment and shadows Platemaker's, or will.

    Run `pip uninstall kernels`, or give Platemaker a virtual environment of its own.
    """

    def __init__(self) -> None:
        super().__init__(" ".join((self.__doc__ or "").split()))


def check_no_other_kernels() -> None:
    """
    Raises:
        OtherKernelsError: Hugging Face's `kernels` (or another) is installed beside ours.
    """
    ours = (Path(kernels.__file__).parent / "steps.py").exists()
    try:
        importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        if ours:
            return
    raise OtherKernelsError
