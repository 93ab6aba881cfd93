"""How much memory there is (of this machine, of the container, of the GPU), and how much this process holds."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # a machine is looked at before there is any training, too

_CGROUP = Path("/sys/fs/cgroup")
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""A container's limit, use and statistics, and in these the cache of files, for cgroup version 2 and 1."""


@dataclass(frozen=True)
class MemoryCapacity:
    """Memory of one device, in bytes."""

    total_bytes: int
    available_bytes: int
    """What this process could hold in all, with what it holds already."""


def measure_device(device: "torch.device") -> MemoryCapacity:
    """Of the device that trains."""
    if device.type != "cuda":
        return measure_host()
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return MemoryCapacity(int(total), int(free) + torch.cuda.memory_reserved(device))


def measure_host(cgroup: Path = _CGROUP) -> MemoryCapacity:
    """Of this machine, or of the container if that allows less."""
    machine = _read_kilobyte_fields(Path("/proc/meminfo"))
    own = resident_bytes()
    total, available = machine["MemTotal"], machine["MemAvailable"] + own
    for limit, used, statistics, cache in _GROUPS:
        with suppress(OSError, ValueError, KeyError):  # no such file, or `max`: no limit
            most, taken = (int((cgroup / name).read_text()) for name in (limit, used))
            words = (line.split() for line in (cgroup / statistics).read_text().splitlines())
            taken -= {name: int(count) for name, count in words}[cache]  # given back when memory is wanted
            total, available = min(total, most), min(available, most - taken + own)
    return MemoryCapacity(total, max(0, available))


def resident_bytes() -> int:
    """Memory of this process now (RSS)."""
    return _read_kilobyte_fields(Path("/proc/self/status"))["VmRSS"]


def allocated_bytes(device: "torch.device") -> int:
    """What this process holds of the device's memory now; of a GPU with what its allocator keeps for later."""
    if device.type != "cuda":
        return resident_bytes()
    import torch

    return int(torch.cuda.memory_reserved(device))


def peak_resident_bytes() -> int:
    """The most that it was since it began, or since `reset_peak`."""
    return _read_kilobyte_fields(Path("/proc/self/status"))["VmHWM"]


def reset_peak() -> bool:
    """Begin a new `peak_resident_bytes` from now on (proc(5), clear_refs); whether the kernel does that."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as stream:  # noqa: PTH123 (nothing may be truncated)
            stream.write("5")
    except OSError:
        return False
    return True


def _read_kilobyte_fields(path: Path) -> dict[str, int]:
    """`Name:  123 kB` lines, in bytes."""
    lines = (line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def disk_free_bytes(path: Path) -> int:
    """Room for this user on the disk that `path` lies on, or will."""
    there = next(one for one in (path, *path.resolve().parents) if one.exists())
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize
