"""Telling whether an error means that memory has run out, on whatever device."""

import torch

MARKS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")


def is_out_of_memory(exc: BaseException) -> bool:
    """True of Python's, torch's and a device library's; only some have a class of their own."""
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(mark in str(exc).lower() for mark in MARKS)
