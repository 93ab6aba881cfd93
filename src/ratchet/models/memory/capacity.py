"""Measures the memory of a machine, container or GPU, and of this process. Imports torch only for a GPU."""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For version 2 of cgroups, then version 1: the files with the memory limit, the used memory and the statistics of a
container, and the field of the statistics that counts file cache."""


@dataclass(frozen=True)
class MemoryCapacity:
    """Memory of one device, in bytes."""

    total_bytes: int
    available_bytes: int
    """Bytes that this process can hold in total, including what it already holds."""


def measure_device(device: "torch.device") -> MemoryCapacity:
    """Measure the memory of the training device."""
    if device.type != "cuda":
        return measure_host()
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return MemoryCapacity(int(total), int(free) + torch.cuda.memory_reserved(device))


def measure_host(cgroup: Path = _CGROUP) -> MemoryCapacity:
    """Measure the memory of this machine, or of the container if its limit is lower."""
    machine = _read_kilobyte_fields(Path("/proc/meminfo"))
    resident = resident_bytes()
    total, available = machine["MemTotal"], machine["MemAvailable"] + resident
    for limit_file, usage_file, statistics_file, cache_field in _CGROUP_FILES:
        with suppress(OSError, ValueError, KeyError):  # no such file, or `max`: no limit
            limit_bytes, used_bytes = (int((cgroup / name).read_text()) for name in (limit_file, usage_file))
            fields = (line.split() for line in (cgroup / statistics_file).read_text().splitlines())
            # The kernel frees file cache on demand.
            used_bytes -= {name: int(count) for name, count in fields}[cache_field]
            total, available = min(total, limit_bytes), min(available, limit_bytes - used_bytes + resident)
    return MemoryCapacity(total, max(0, available))


def resident_bytes() -> int:
    """Return the current memory of this process (RSS)."""
    return _read_kilobyte_fields(Path("/proc/self/status"))["VmRSS"]


def allocated_bytes(device: "torch.device") -> int:
    """Return the bytes of the device's memory held by this process; on a GPU including its allocator's cache."""
    if device.type != "cuda":
        return resident_bytes()
    import torch

    return int(torch.cuda.memory_reserved(device))


def peak_resident_bytes() -> int:
    """Return the highest RSS since the process started or since `reset_peak`."""
    return _read_kilobyte_fields(Path("/proc/self/status"))["VmHWM"]


def reset_peak() -> bool:
    """Reset `peak_resident_bytes` (proc(5), clear_refs). Return False if the kernel does not support it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _read_kilobyte_fields(path: Path) -> dict[str, int]:
    """Read lines of the form `Name:  123 kB`; values in bytes."""
    lines = (line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines if len(fields) == 3 and fields[2] == "kB"}


def disk_free_bytes(path: Path) -> int:
    """Return the free bytes for this user on the disk of `path`, which need not exist."""
    return shutil.disk_usage(next(folder for folder in (path, *path.resolve().parents) if folder.exists())).free
