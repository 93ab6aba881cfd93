"""What a machine has beside GPUs: CPUs that we may use, memory, a disk that keeps what it is given."""

import math
import os
import secrets
from pathlib import Path

from ratchet import files
from ratchet.errors import first_line
from ratchet.model import capacity

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1, _PERIOD_V1 = (Path("/sys/fs/cgroup/cpu", name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
_TRIAL = b"ratchet\n" * (1 << 16)
"""Half a megabyte."""


def cpus(quota: Path = _QUOTA, quota_v1: Path = _QUOTA_V1, period_v1: Path = _PERIOD_V1) -> int:
    """CPUs that this process may use: those it is bound to, or fewer where its container has a quota of their time."""
    bound = len(os.sched_getaffinity(0))
    for paths in ((quota,), (quota_v1, period_v1)):
        try:
            most, period = (float(word) for path in paths for word in path.read_text().split())
        except (OSError, ValueError):  # not this kind of cgroup, or `max`: no quota
            continue
        return min(bound, max(1, math.floor(most / period))) if most > 0 else bound
    return bound


def memory() -> capacity.Capacity:
    """Of this machine, or of the container if that allows less."""
    return capacity.of_host()


def disk_free_bytes(folder: Path) -> int:
    """Room for this user on the disk that the folder lies on, or will."""
    return capacity.disk_free_bytes(folder)


def fault_of_disk(folder: Path) -> str:
    """Write a file there, force it to the disk, read it back and remove it; what went wrong, empty if nothing did."""
    trial = folder / f"{files.PARTIAL}admission-{secrets.token_hex(4)}"
    try:
        files.make_directory(folder)
        try:
            files.write_blocks(trial, [[_TRIAL]])
            files.fsync_directory(folder)
            same = trial.read_bytes() == _TRIAL
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or first_line(error)}"
    return "" if same else f"{folder}: what was written is not what was read back"
