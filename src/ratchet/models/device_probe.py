"""What this machine computes with, and whether 4 bits work on it: found by using them, not by a version."""

from collections.abc import Iterable
from pathlib import Path

import torch

from ratchet.config.units import written
from ratchet.errors import first_line
from ratchet.models.memory import capacity

TorchDevice = torch.device
"""For those who may not import torch."""

TOLERATED = {"nf4": 0.11, "fp4": 0.15}
"""Relative error of normally distributed weights that is still rounding: it is 0.092 and 0.122 in blocks of 64."""
ROWS = 64


def described(device: torch.device) -> str:
    """The device that trains, and its memory, in one line."""
    memory = capacity.of(device)
    room = f"{written(memory.available_bytes)} of {written(memory.total_bytes)} at hand"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}), {room}"
    return f"{_cpu_name()}, {torch.get_num_threads()} threads, {room}; no GPU is used"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def fault_of_four_bits(device: torch.device, widths: Iterable[int], kind: str) -> str | None:
    """What is wrong with 4-bit matrices of these input widths, in a sentence; None when they work.

    Weights are quantised and read back. That is not idle: on a CPU with AVX-512, bitsandbytes 0.50.2 gives wrong
    numbers for every width below 512 that is a multiple of 16 and none of 64, with errors of 0.2 to 0.4.

    Args:
        device: where the model will be.
        widths: inputs of the linear layers.
        kind: `nf4` or `fp4`.
    """
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except (ImportError, OSError, RuntimeError) as missing:  # its libraries may be missing, or for another CUDA
        return f"bitsandbytes cannot be loaded ({first_line(missing)})"
    for width in sorted(set(widths)):
        weight = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width))
        try:
            weight = weight.to(device)
            packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=True)
            error = float((dequantize_4bit(packed, state) - weight).norm() / weight.norm())
        except Exception as failure:  # whatever a kernel that is not made for this device raises
            return f"bitsandbytes cannot store 4 bits on this {device.type} ({first_line(failure)})"
        if not error <= TOLERATED[kind]:
            return (
                f"bitsandbytes reads 4-bit matrices of {width} inputs wrongly on this {device.type}: "
                f"error {error:.0%}, where {TOLERATED[kind]:.0%} would be rounding"
            )
    return None
