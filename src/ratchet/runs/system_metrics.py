"""Samples of the use of CPU, memory, disk, network and GPUs, for the journal event `system_metrics`.

A thread of the supervisor takes the samples. The worker is not involved, and a hanging disk or driver blocks only this
thread. This module does not import torch.
"""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ratchet.config.machine import Machine
from ratchet.runs.gpus import QUERY, parse_inventory
from ratchet.runs.journal import Journal

FIRST_S = 5.0
"""Maximum time to the first sample of an attempt, so that a short training has a sample too."""
POLL_S = 0.25
GPU_WAIT_S = 10.0  # the query loads the driver first if persistence mode is off

Gpu = dict[str, float | int | None]


class GpuSampler:
    """Sampler of the visible GPUs of this machine, with a separate process (runs/gpus.py)."""

    def __init__(self, query: tuple[str, ...] = QUERY, wait_s: float = GPU_WAIT_S) -> None:
        self._query, self._wait_s = query, wait_s
        self._known: list[Gpu] = []
        self._hanging: subprocess.Popen[str] | None = None
        """A query that timed out. It may never end, because a process inside the driver cannot be killed."""

    def sample(self) -> list[Gpu]:
        """Return the current values; None for all values if the driver does not answer. Never raises."""
        if self._hanging is not None and self._hanging.poll() is None:
            return self._without_values()
        self._hanging = None
        try:
            query = subprocess.Popen(
                self._query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True,
                errors="replace",
            )  # fmt: skip
            text, _ = query.communicate(timeout=self._wait_s)
            devices = parse_inventory(text).devices
        except subprocess.TimeoutExpired:
            query.kill()
            if query.stdout:
                query.stdout.close()
            self._hanging = query
            return self._without_values()
        except (OSError, ValueError):
            return self._without_values()
        gpus: dict[int, Gpu] = {
            device.index: {
                "index": device.index, "utilization_percent": device.utilization_percent,
                "memory_bytes": device.used_bytes, "memory_total_bytes": device.total_bytes,
                "power_w": device.power_w, "temperature_c": device.temperature_c,
            }
            for device in devices
        }  # fmt: skip
        # A lost GPU may be missing: it stays in the list without values.
        missing = {gpu["index"]: gpu for gpu in self._without_values()}
        self._known = [gpu for _, gpu in sorted((missing | gpus).items())]
        return self._known

    def _without_values(self) -> list[Gpu]:
        """Return the GPUs of earlier samples, with None for all values."""
        return [dict.fromkeys(gpu) | {"index": gpu["index"]} for gpu in self._known]


class UsageSampler:
    """Sampler of the use of the machine and of a worker. It counts CPU time from one call to the next."""

    def __init__(self, disk: Path, gpus: GpuSampler | None) -> None:
        self._disk, self._gpus = disk, gpus
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._sampled_s = time.monotonic()
        psutil.cpu_percent()

    def begin(self, worker: int) -> None:
        """Start counting the CPU time of the worker with this process id."""
        psutil.cpu_percent()
        self._sample_worker(worker)

    def sample(self, worker: int) -> dict[str, Any]:
        """Return all values by their keys in the event; None if unknown. Never raises."""
        worker_cpu_percent, worker_bytes = self._sample_worker(worker)
        memory, network = _measure(psutil.virtual_memory), _measure(psutil.net_io_counters)
        disk = _measure(lambda: psutil.disk_usage(str(self._disk)))
        return {
            "cpu_percent": psutil.cpu_percent(),
            "memory_bytes": memory and memory.total - memory.available,
            "memory_percent": memory and memory.percent,
            "disk_used_percent": disk and disk.percent,
            "network_received_bytes": network and network.bytes_recv,
            "network_sent_bytes": network and network.bytes_sent,
            "worker_cpu_percent": worker_cpu_percent,
            "worker_memory_bytes": worker_bytes,
            "gpus": [] if self._gpus is None else self._gpus.sample(),
        }

    def _sample_worker(self, pid: int) -> tuple[float | None, int | None]:
        """Return CPU use since the last call (percent; 100: one CPU) and memory of the worker with all its children."""
        now_s, cpu_s, memory_bytes, used_s = time.monotonic(), {}, 0, 0.0
        with contextlib.suppress(OSError, psutil.Error):
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(OSError, psutil.Error):  # the process has ended in the meantime
                    key, times = (process.pid, process.create_time()), process.cpu_times()
                    cpu_s[key] = times.user + times.system
                    memory_bytes += process.memory_info().rss
                    used_s += cpu_s[key] - self._cpu_s.get(key, 0.0)
        elapsed_s, self._sampled_s, self._cpu_s = now_s - self._sampled_s, now_s, cpu_s
        if not cpu_s:
            return None, None
        return (round(100 * used_s / elapsed_s, 1) if elapsed_s > 0 else None), memory_bytes


def _measure(function: Callable[[], Any]) -> Any:
    """Return the result of a function of psutil; None if it is not available on this machine."""
    try:
        return function()
    except (OSError, psutil.Error):
        return None


class SystemMetricsSampler(threading.Thread):
    """Thread that appends samples to the journal while there is a worker."""

    def __init__(self, journal: Journal, machine: Machine, worker: Callable[[], int | None], count: int) -> None:
        super().__init__(name="system metrics", daemon=True)
        self._journal, self._worker, self._count = journal, worker, count
        self._every_s = machine.system_metrics_interval_s
        self._usage = UsageSampler(journal.path.parent, GpuSampler() if machine.device != "cpu" else None)
        self._ended = threading.Event()

    def run(self) -> None:
        sampled_pid, due_s = None, 0.0
        while not self._ended.wait(POLL_S):
            pid, now_s = self._worker(), time.monotonic()
            if pid is None:
                sampled_pid = None
            elif pid != sampled_pid:
                sampled_pid, due_s = pid, now_s + min(FIRST_S, self._every_s)
                self._usage.begin(pid)
            elif now_s >= due_s:
                due_s = now_s + self._every_s
                sample = self._usage.sample(pid)
                if self._worker() == pid and not self._ended.is_set():  # otherwise the worker is gone
                    self._count += 1
                    self._journal.append("system_metrics", sample=self._count, **sample)

    def end(self) -> None:
        """Take no more samples. Waits only briefly for a hanging disk or driver."""
        self._ended.set()
        if self.is_alive():
            self.join(1.0)
