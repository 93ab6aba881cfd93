"""Kernels in C++ for CPUs: attention and other operators."""
