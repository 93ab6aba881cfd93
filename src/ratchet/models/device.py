"""Where a model runs, and in which numbers. Below everything else in this room."""

from typing import Any, Literal

import torch

from ratchet.errors import SettingsError

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
