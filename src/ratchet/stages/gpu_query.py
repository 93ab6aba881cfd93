"""Asks the NVIDIA driver about GPUs without torch, in a separate process because a faulty GPU can hang.

    python -m ratchet.stages.gpu_query     prints what `query_gpus` returns, as JSON

The CUDA Driver API (libcuda.so.1) sees what a training would see, so CUDA_VISIBLE_DEVICES applies. NVML gives the
version of the driver.
"""

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict, dataclass

PATIENCE_S = 60.0
_NAME_BYTES = 96
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


@dataclass(frozen=True)
class GpuDevice:
    """One that can be used."""

    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    """With a context open, as a training has one."""


@dataclass(frozen=True)
class GpuInventory:
    """All that can be used here."""

    devices: tuple[GpuDevice, ...] = ()
    cuda: str = ""
    """The newest CUDA that the driver can do; empty when there is none."""
    driver: str = ""
    """Version of the driver; empty when it is not known."""
    trouble: str = ""
    """Why there are none."""


def query_gpus(patience_s: float = PATIENCE_S) -> GpuInventory:
    """Ask, in a process of its own; what cannot be asked is `trouble`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ratchet.stages.gpu_query"],
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
        )
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return GpuInventory(trouble=f"the driver did not answer within {patience_s:g} s")
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return GpuInventory(trouble=f"asking the driver failed ({last[:200]})")
    return GpuInventory(**(told | {"devices": tuple(GpuDevice(**one) for one in told["devices"])}))


class _CudaDriver:
    """The few calls that are needed. Raises OSError when the library is not there or a call fails."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise OSError("libcuda.so.1 is not there: no NVIDIA driver, or a container without access to it") from None
        self._call("cuInit", 0)

    def version(self) -> str:
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def count(self) -> int:
        number = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def gpu(self, index: int) -> GpuDevice:
        device, name, context = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetName", name, _NAME_BYTES, device)
        capability = []
        for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            capability.append(str(value.value))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxSetCurrent", context)
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)
        return GpuDevice(name.value.decode(errors="replace"), ".".join(capability), total.value, free.value)

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} failed with error {code} of the CUDA driver")


def _driver_version() -> str:
    """The driver's version, from NVML; empty when that is not there."""
    text = ctypes.create_string_buffer(_NAME_BYTES)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, _NAME_BYTES):
            return ""
    except (OSError, AttributeError):
        return ""
    return text.value.decode(errors="replace")


def _query_in_process() -> GpuInventory:
    """Ask in this process."""
    driver = _driver_version()
    try:
        cuda = _CudaDriver()
        return GpuInventory(tuple(cuda.gpu(index) for index in range(cuda.count())), cuda.version(), driver)
    except (OSError, AttributeError) as error:
        return GpuInventory(driver=driver, trouble=str(error))


if __name__ == "__main__":
    print(json.dumps(asdict(_query_in_process())))
