"""Records the conditions of a measurement: date, machine, versions, and load by other processes.

The record begins when report.py imports this module, and so with the benchmark.
"""

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors", "numpy", "trl", "lm_eval", "optuna",
    "mlflow", "dvc",
)  # fmt: skip
CROWDED = 0.1
"""Share of the CPUs that other processes may use. With a larger share, measured times are unreliable."""

_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """Readings of the clocks at one time."""

    at_s: float
    busy_s: float
    """CPU seconds of all processes on the CPUs that this process may use, including time that a host took from its
    guest."""
    own_s: float
    """CPU seconds of this process and its descendants. The seconds of a process whose parent ended before it are
    lost."""
    cpus: int

    @classmethod
    def now(cls) -> "Reading":
        """Read the clocks. The system's clock is first, so that the time of reading is not attributed to other
        processes."""
        return cls(time.monotonic(), _busy_s(), _own_s(), len(os.sched_getaffinity(0)))

    def others(self, later: "Reading") -> float:
        """Return the share (0 to 1) of the CPUs' time that other processes took between two readings."""
        elapsed_s = later.at_s - self.at_s
        if elapsed_s <= 0:
            return 0.0
        taken_s = (later.busy_s - self.busy_s) - (later.own_s - self.own_s)
        return min(1.0, max(0.0, taken_s / (elapsed_s * self.cpus)))


def _busy_s() -> float:
    """Return busy seconds from proc(5), stat: all columns but idle, iowait, and guests, which `user` includes."""
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in (_PROC / "stat").read_text(encoding="ascii").splitlines())
    return _TICK_S * sum(sum(map(int, words[1:4] + words[6:9])) for words in lines if words[0] in allowed)


def _own_s() -> float:
    """Return the CPU seconds of this process, of its ended children and of its running descendants."""
    own = os.times()
    return sum(own[:4]) + sum(_living_s())


def _living_s() -> Iterator[float]:
    """Yield the CPU seconds of each running descendant, including children that it has waited for."""
    parents, seconds = {}, {}
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process ended meanwhile
            words = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            number = int(path.parent.name)
            parents[number], seconds[number] = int(words[1]), _TICK_S * sum(map(int, words[11:15]))
    below = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in below} - below:
        below |= more
    yield from (seconds[number] for number in below - {os.getpid()})


START, BEGUN = Reading.now(), datetime.now(UTC)


def since_start() -> dict[str, Any]:
    """Return date, machine, versions, and the load since the start of the benchmark."""
    now = Reading.now()
    return {
        "begun": BEGUN.isoformat(timespec="seconds"),
        "elapsed_s": round(now.at_s - START.at_s, 1),
        "own_cpu_s": round(now.own_s - START.own_s, 1),
        "others_share": round(START.others(now), 3),
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    found = {
        "processor": _field("cpuinfo", "model name"), "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": int(_field("meminfo", "MemTotal").split()[0]) * 1024, "system": platform.platform(),
    }  # fmt: skip
    torch = sys.modules.get("torch")  # a process that has not imported torch has not used a GPU
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def describe(machine: dict[str, Any], versions: dict[str, str]) -> str:
    """Return machine and versions in one line."""
    where = [str(machine["processor"]), f"{machine['cpus']} CPUs", f"{machine['memory_bytes'] / 1e9:.0f} GB"]
    where += [machine["gpu"]] if "gpu" in machine else []
    libraries = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{', '.join(where)}; {machine['system']}; {libraries}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that results depend on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def warning(others_share: float) -> str:
    """Return a warning about load by other processes, or an empty text."""
    if others_share <= CROWDED:
        return ""
    return f"other processes took {100 * others_share:.0f} % of the CPUs: figures of time say little"


def _field(file: str, name: str) -> str:
    """Return the first value of this name in a file of `name: value` lines."""
    for line in (_PROC / file).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown" if file == "cpuinfo" else "0"
