"""Attention on a CPU by our own C++, built once per machine. From outside only `kernels.native.backend` is asked for."""
