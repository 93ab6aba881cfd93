"""Facts about the NVIDIA GPUs of this machine, from the driver's management library (NVML), without torch.

A faulty GPU can block every call of its driver, and a process that is blocked in the driver cannot be killed. So a
separate process asks, and callers wait for it only for a limited time:

    python -m ratchet.runs.gpus     prints the inventory as JSON
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from ratchet.config.units import describe_failure

QUERY = (sys.executable, "-m", "ratchet.runs.gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")
"""Folder of the device files."""
QUERY_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 1.0
"""Longest wait for the end of a query that was killed."""
T = TypeVar("T")


@dataclass(frozen=True)
class GpuReading:
    """A GPU that a training may use. Values that the driver does not report are None."""

    name: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    index: int = 0
    uuid: str | None = None
    utilization_percent: int | None = None
    used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None


@dataclass(frozen=True)
class GpuInventory:
    """All GPUs that a training may use (CUDA_VISIBLE_DEVICES)."""

    devices: tuple[GpuReading, ...] = ()
    cuda: str = ""
    """Newest CUDA version that the driver supports; empty without a driver."""
    driver: str = ""
    problem: str = ""
    """Reason why there are no devices; empty if there are."""


def parse_inventory(text: str) -> GpuInventory:
    """Parse the output of QUERY. Raises ValueError."""
    from pydantic import TypeAdapter  # imported late, because the process of QUERY must start quickly

    return TypeAdapter(GpuInventory).validate_json(text)


def query_gpus(timeout_s: float = QUERY_TIMEOUT_S) -> GpuInventory:
    """List the GPUs with a separate process. If the process fails, `GpuInventory.problem` has the cause."""
    process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=timeout_s)
        return parse_inventory(output)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver cannot be killed
            process.communicate(timeout=KILL_TIMEOUT_S)
        return GpuInventory(problem=f"the driver did not answer within {timeout_s:g} s")
    except ValueError:
        reason = describe_failure(errors, process.returncode)
        return GpuInventory(problem=f"the query of the driver failed ({reason[:200]})")


def read_inventory(visible: str | None) -> GpuInventory:
    """List the GPUs in this process. `visible` is the value of CUDA_VISIBLE_DEVICES; None: all GPUs."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return GpuInventory(problem="no NVIDIA driver (libnvidia-ml.so.1), or a container without access to it")
    except pynvml.NVMLError as error:
        return GpuInventory(problem=f"the driver does not work: {error}")
    try:
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = pynvml.nvmlSystemGetDriverVersion()
        readings = [_read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return GpuInventory(problem=f"the driver does not work: {error}")
    finally:
        pynvml.nvmlShutdown()
    if visible is not None:  # CUDA_VISIBLE_DEVICES has indices, or beginnings of UUIDs
        names = _split_names(visible)
        readings = [r for r in readings if any(n == str(r.index) or (r.uuid or "").startswith(n) for n in names)]
    devices = tuple(readings)
    return GpuInventory(devices, f"{number // 1000}.{number % 1000 // 10}", driver, "" if devices else "no usable GPU")


def _read_gpu(index: int) -> GpuReading:
    import pynvml

    def ask(function: Callable[..., T], *arguments: object) -> T | None:
        try:
            return function(handle, *arguments)
        except pynvml.NVMLError:  # not supported by this GPU, or the GPU is lost
            return None

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:  # the GPU is lost
        return GpuReading(index=index)
    milliwatts = ask(pynvml.nvmlDeviceGetPowerUsage)
    memory, rates = ask(pynvml.nvmlDeviceGetMemoryInfo), ask(pynvml.nvmlDeviceGetUtilizationRates)
    return GpuReading(
        name=ask(pynvml.nvmlDeviceGetName),
        total_bytes=None if memory is None else memory.total,
        free_bytes=None if memory is None else memory.free,
        index=index,
        uuid=ask(pynvml.nvmlDeviceGetUUID),
        utilization_percent=None if rates is None else rates.gpu,
        used_bytes=None if memory is None else memory.used,
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
    )


def list_visible_gpus(devices: Path = DEVICES) -> tuple[str, ...]:
    """List the NVIDIA GPUs that CUDA would show, as in CUDA_VISIBLE_DEVICES, or from the device files without it. The
    driver is not called."""
    visible = os.environ.get(VISIBLE)
    return tuple(map(str, range(_count_gpus(devices))) if visible is None else _split_names(visible))


def count_visible_gpus(devices: Path = DEVICES) -> int:
    """Count the NVIDIA GPUs that CUDA would show; 0 without a device file. The driver is not called."""
    return len(list_visible_gpus(devices)) if _count_gpus(devices) else 0


def _count_gpus(devices: Path) -> int:
    return sum(bool(re.fullmatch(r"nvidia[0-9]+", path.name)) for path in devices.glob("nvidia*"))


def _split_names(visible: str) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES. An entry -1 ends the list (CUDA C++ Programming Guide)."""
    names = [name.strip() for name in visible.split(",")]
    return [name for name in (names[: names.index("-1")] if "-1" in names else names) if name]


if __name__ == "__main__":
    print(json.dumps(asdict(read_inventory(os.environ.get(VISIBLE)))))
