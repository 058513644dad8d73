"""Attention on a CPU by our own C++, built once per machine. Outside, only `kernels.native.backend` is asked for."""
