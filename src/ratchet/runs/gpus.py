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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

QUERY = (sys.executable, "-m", "ratchet.runs.gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY_TIMEOUT_S = 60.0
"""Timeout of the process that asks the driver, in seconds."""
T = TypeVar("T")


@dataclass(frozen=True)
class GpuReading:
    """A GPU that a training may use. Values that the driver does not tell are None."""

    name: str | None = None
    compute_capability: str | None = None
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
    """Version of the driver; empty if it is not known."""
    problem: str = ""
    """Reason why there are no devices; empty if there are."""


def parse_inventory(text: str) -> GpuInventory:
    """Parse the output of QUERY. Raises ValueError."""
    inventory = json.loads(text)
    try:
        devices = tuple(GpuReading(**device) for device in inventory.pop("devices"))
        return GpuInventory(devices, **inventory)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(str(error)) from None


def query_gpus(timeout_s: float = QUERY_TIMEOUT_S) -> GpuInventory:
    """List the GPUs with a separate process. If the process fails, `GpuInventory.problem` has the cause."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=timeout_s, check=False)
        return parse_inventory(done.stdout)
    except subprocess.TimeoutExpired:
        return GpuInventory(problem=f"the driver did not answer within {timeout_s:g} s")
    except ValueError:
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return GpuInventory(problem=f"the query of the driver failed ({last_line[:200]})")


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
    devices = tuple(reading for reading in readings if is_visible(reading, visible))
    return GpuInventory(devices, f"{number // 1000}.{number % 1000 // 10}", driver, "" if devices else "no usable GPU")


def _read_gpu(index: int) -> GpuReading:
    import pynvml

    def ask(function: Callable[..., T], *arguments: object) -> T | None:
        try:
            return function(handle, *arguments)
        except pynvml.NVMLError:  # not supported by this GPU, or the GPU is lost
            return None

    reading = GpuReading(index=index)
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:  # the GPU is lost
        return reading
    if (capability := ask(pynvml.nvmlDeviceGetCudaComputeCapability)) is not None:
        reading = replace(reading, compute_capability=".".join(map(str, capability)))
    if (memory := ask(pynvml.nvmlDeviceGetMemoryInfo)) is not None:
        reading = replace(reading, total_bytes=memory.total, free_bytes=memory.free, used_bytes=memory.used)
    if (rates := ask(pynvml.nvmlDeviceGetUtilizationRates)) is not None:
        reading = replace(reading, utilization_percent=rates.gpu)
    if (milliwatts := ask(pynvml.nvmlDeviceGetPowerUsage)) is not None:
        reading = replace(reading, power_w=milliwatts / 1000)
    return replace(
        reading,
        name=ask(pynvml.nvmlDeviceGetName),
        uuid=ask(pynvml.nvmlDeviceGetUUID),
        temperature_c=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
    )


def is_visible(reading: GpuReading, visible: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES has a GPU, by its index or the beginning of its UUID."""
    if visible is None:
        return True
    return any(name == str(reading.index) or (reading.uuid or "").startswith(name) for name in _split_names(visible))


def count_visible_gpus(devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs that CUDA would show, from the device files, without a call of the driver."""
    present = sum(bool(re.fullmatch(r"nvidia[0-9]+", path.name)) for path in devices.glob("nvidia*"))
    visible = os.environ.get(VISIBLE)
    return present if visible is None or not present else len(_split_names(visible))


def _split_names(visible: str) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES. An entry -1 ends the list (CUDA C++ Programming Guide)."""
    names = [name.strip() for name in visible.split(",")]
    return [name for name in (names[: names.index("-1")] if "-1" in names else names) if name]


if __name__ == "__main__":
    print(json.dumps(asdict(read_inventory(os.environ.get(VISIBLE)))))
