"""Selects device, dtype and threads, describes the device, tests its 4-bit kernels, and recognizes its errors.

Of the modules of this package, this module imports only memory/capacity.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from ratchet.config.units import format_bytes
from ratchet.errors import SettingsError, first_line
from ratchet.models.memory import capacity
from ratchet.runs.gpus import VISIBLE, count_visible_gpus, list_visible_gpus

Model = Any
"""A transformers or peft model; the libraries' own types are not more precise."""

TorchDevice = torch.device
"""Alias for modules that must not import torch."""

NARROW_HIDDEN_SIZE = 512
"""Hidden size below which models train as fast or faster with one thread, because two threads spend more time on
synchronization than on a matrix product. On two cores, one thread takes 0.6 of the time of two threads at a hidden size
of 128 and 256, 1.1 times their time at 512, and 1.3 times at 1024."""

MAX_ROUNDING_ERROR = {"nf4": 0.11, "fp4": 0.15}
"""Relative error of normally distributed weights above which quantization counts as faulty. Rounding alone gives 0.092
for NF4 and 0.122 for FP4 in blocks of 64."""
TEST_ROWS = 64

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",  # torch 2.13, c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
    "CUDA error: out of memory",  # allocations outside torch's allocator: pinned and paged memory
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
_DEVICE_LOST_TEXTS = (
    "CUDA error:",  # also of cuBLAS and cuSOLVER, whose errors torch 2.13 does not raise as AcceleratorError
    "CUDA driver error:",
    "cuDNN error:",
    "unhandled cuda error",  # of NCCL (ncclGetErrorString)
)


def use_threads(count: int, ranks: int = 1, hidden_size: int | None = None) -> None:
    """Set torch's CPU threads to `machine.threads`.

    Args:
        count: number of threads; 0: one for a hidden size below NARROW_HIDDEN_SIZE, otherwise torch's default (one per
            physical core).
        ranks: number of ranks that share the cores.
        hidden_size: hidden size of the model; None: unknown, treated as at least NARROW_HIDDEN_SIZE.
    """
    if count == 0 and hidden_size is not None and hidden_size < NARROW_HIDDEN_SIZE:
        count = 1
    if count or ranks > 1:
        torch.set_num_threads(count or max(1, torch.get_num_threads() // ranks))


def pick_device(setting: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device that `machine.device` selects.

    Raises SettingsError for `cuda` without a GPU; and for `auto` if the driver shows a GPU that a CUDA build of torch
    cannot use. A run that lost its GPU would otherwise resume on the CPU, many times slower.
    """
    if setting == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if setting == "cuda":
        raise SettingsError(
            f"machine.device: cuda, but torch finds no GPU ({explain_missing_gpu()}); set auto or cpu, or install a "
            "CUDA build"
        )
    if torch.version.cuda is not None and count_visible_gpus():
        raise SettingsError(
            f"machine.device: auto, but torch cannot use the GPU of this machine ({explain_missing_gpu()}); repair "
            "that, or set cpu"
        )
    return torch.device("cpu")


def explain_missing_gpu() -> str:
    """Return why torch can use no GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if os.environ.get(VISIBLE) is not None and not list_visible_gpus():
        return f"{VISIBLE} hides all GPUs"
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises several types; the text names the driver, the device or the library
        return first_line(error)
    return "the driver lists none"


def get_gpu_name(device: torch.device) -> str:
    """Return the name of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""


def pick_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products.

    `auto` is bfloat16 on a GPU that supports it (NVIDIA: compute capability 8.0 or later), float16 on other GPUs, and
    float32 on a CPU. A CPU without bfloat16 instructions is half as fast in bfloat16 (measured on a model of 10M
    parameters). CPU features are not tested, so that a run has the same dtype on every CPU; results still
    differ by rounding.
    """
    if setting != "auto":
        return _DTYPES[setting]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def require_dtype(setting: str, device: torch.device) -> None:
    """Raise SettingsError if `train.compute_dtype` is a dtype that the GPU does not support.

    torch silently emulates bfloat16 on older GPUs, which is slower than float32. float16 on a CPU is slow too, but
    allowed, because it is not emulated.
    """
    if setting != "bfloat16" or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    major, minor = torch.cuda.get_device_capability(device)
    raise SettingsError(
        f"train.compute_dtype: bfloat16 is not supported by {torch.cuda.get_device_name(device)} (compute capability "
        f"{major}.{minor}; expected at least 8.0); set auto or float16"
    )


# Errors of devices; oom.py uses these functions, and this module is below it.


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of any device, which a smaller batch may avoid."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def is_device_lost(error: BaseException) -> bool:
    """Return whether the process cannot compute on its GPU any more, so that it must end."""
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in _DEVICE_LOST_TEXTS)


def is_device_error(error: BaseException) -> bool:
    """Return whether an error is that of this process's own device: its memory ran out, or it computes no more."""
    return is_out_of_memory(error) or is_device_lost(error)


# Description of the device, and a test of 4-bit quantization, which runs the kernels instead of checking a version.


def describe_device(device: torch.device) -> str:
    """Describe the training device and its memory in one line."""
    memory = capacity.measure_device(device)
    free = f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} available"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}), {free}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, {torch.get_num_threads()} threads, {free}; no GPU is used"


def find_four_bit_fault(device: torch.device, widths: Iterable[int], kind: str) -> str | None:
    """Quantize and dequantize matrices of these input widths; describe the first fault, or return None.

    The test is necessary: on a CPU with AVX-512, bitsandbytes 0.50.2 gives wrong numbers for every width below 512 that
    is a multiple of 16 but not of 64, with errors of 0.2 to 0.4.
    """
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except (ImportError, OSError, RuntimeError) as error:  # its binary libraries may be missing, or need another CUDA
        return f"bitsandbytes cannot be loaded ({first_line(error)})"
    for width in sorted(set(widths)):
        weight = torch.randn(TEST_ROWS, width, generator=torch.Generator().manual_seed(width))
        try:
            weight = weight.to(device)
            packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=True)
            relative_error = float((dequantize_4bit(packed, state) - weight).norm() / weight.norm())
        except Exception as error:  # kernels for other devices raise arbitrary errors
            if is_device_error(error):
                raise
            return f"bitsandbytes cannot quantize to 4 bits on this {device.type} ({first_line(error)})"
        if not relative_error <= MAX_ROUNDING_ERROR[kind]:
            return (
                f"bitsandbytes dequantizes 4-bit matrices with {width} inputs wrongly on this {device.type}: error "
                f"{relative_error:.0%}, expected at most {MAX_ROUNDING_ERROR[kind]:.0%}"
            )
    return None
