"""Triton kernels of decode. Only `kernels.triton.backend` is asked for from outside, and only where Triton runs."""
