"""Kernels in C++ for float32 on CPUs."""
