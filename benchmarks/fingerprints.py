"""Computes SHA-256 of tensors and plain values, for both sides of benchmarks/chaos.py."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch


def fingerprint(tensors: Mapping[str, torch.Tensor], rest: Any = None) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of tensors, and of plain values."""
    found = hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
