"""Attention on a CPU by our own C++, built once per machine. Only `kernels.native.backend` is asked for from outside."""
