"""Kernels of our own for float32 on CPUs: attention, norms, gated units and rotary embeddings."""
