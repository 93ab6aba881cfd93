"""Where a model runs, and in which numbers. Below everything else in this room."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from ratchet.config.units import format_bytes
from ratchet.errors import SettingsError, first_line
from ratchet.models.memory import capacity

Model = Any
"""A transformers or peft model; their own types say no more."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


NARROW = 512
"""Hidden sizes below train as fast with one thread or faster: two wait longer for each other than a product takes (two
cores: 0.6 of the time at 128 and 256, 1.1 times at 512, 1.3 at 1024; docs/performance.md)."""


def use_threads(count: int, sharing: int = 1, hidden_size: int | None = None) -> None:
    """Set the CPU threads of torch to `machine.threads`.

    Args:
        count: 0: one for a model narrower than NARROW, else torch's choice: one for each physical core.
        sharing: ranks that divide those cores among them.
        hidden_size: of the model that is computed; None: not known, so not narrow.
    """
    if count == 0 and hidden_size is not None and hidden_size < NARROW:
        count = 1
    if count or sharing > 1:
        torch.set_num_threads(count or max(1, torch.get_num_threads() // sharing))


def pick_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of `machine.device`. Raises SettingsError when it asks for a GPU and there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError("machine.device: cuda, but torch finds no GPU; set auto or cpu, or install a CUDA build")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The type of matrix products.

    `auto` is bfloat16 on a GPU that computes in it (NVIDIA: since compute capability 8.0), float16 on one that does
    not, and float32 on a CPU: without instructions for bfloat16 that is half as fast in it (measured on a model of
    10M parameters), and which CPU has them is not asked, so that a run on CPUs computes the same on each of them.
    """
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def require_dtype(wanted: str, device: torch.device) -> None:
    """Raises SettingsError when `train.compute_dtype` names a type that the GPU does not compute in.

    torch emulates bfloat16 on older GPUs, slower than float32 and without being asked. float16 on a CPU is slow as
    well, and is computed as asked: nothing is emulated.
    """
    if wanted != "bfloat16" or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    major, minor = torch.cuda.get_device_capability(device)
    raise SettingsError(
        f"train.compute_dtype: bfloat16, but {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) "
        "does not compute in it, which takes 8.0; set auto or float16"
    )


# What this machine computes with, and whether 4 bits work on it: found by using them, not by a version.

TorchDevice = torch.device
"""For those who may not import torch."""

TOLERATED = {"nf4": 0.11, "fp4": 0.15}
"""Relative error of normally distributed weights that is still rounding: it is 0.092 and 0.122 in blocks of 64."""
ROWS = 64


def describe_device(device: torch.device) -> str:
    """The device that trains, and its memory, in one line."""
    memory = capacity.measure_device(device)
    room = f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} at hand"
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


def find_four_bit_fault(device: torch.device, widths: Iterable[int], kind: str) -> str | None:
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
