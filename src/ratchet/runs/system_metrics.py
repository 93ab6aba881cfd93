"""What a training uses of its machine, noted in the journal now and then: event `system`. Imports no torch.

A thread of the supervisor's asks: the worker does not know of it, and a disk or a driver that hangs holds up nobody
else.
"""

import contextlib
import csv
import io
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ratchet.config.schema import Machine
from ratchet.runs.journal import Journal
from ratchet.runs.rendezvous import VISIBLE

FIRST_S = 5.0
"""Of an attempt, the first sample comes after so long, if not sooner: short trainings have one too."""
POLL_S = 0.25
GPU_WAIT_S = 10.0
"""Longest wait for the driver: without persistence mode it loads itself first."""
MIB = 1 << 20

Gpu = dict[str, float | int | None]
_FIELDS = ("index", "uuid", "utilization.gpu", "memory.used", "memory.total", "power.draw", "temperature.gpu")
GPU_QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")


def parse_nvidia_smi(text: str, visible: str | None = None) -> list[Gpu]:
    """What nvidia-smi says to GPU_QUERY: a GPU a line; other lines, such as those about a lost GPU, are left out.

    Args:
        text: its standard output. A value that is not a number ([N/A], [Unknown Error]) is not known: None.
        visible: CUDA_VISIBLE_DEVICES; None: all are.
    """
    wanted = None if visible is None else [name.strip() for name in visible.split(",")]
    if wanted is not None and "-1" in wanted:
        wanted = wanted[: wanted.index("-1")]
    found: list[Gpu] = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) != len(_FIELDS) or not row[0].strip().isdecimal():
            continue
        index, uuid = row[0].strip(), row[1].strip()
        if wanted is not None and not any(name == index or (name and uuid.startswith(name)) for name in wanted):
            continue
        utilization, used, total, power, temperature = map(_parse_number, row[2:])
        found.append({
            "index": int(index), "utilization_percent": utilization, "memory_bytes": _convert_mib(used),
            "memory_total_bytes": _convert_mib(total), "power_w": power, "temperature_c": temperature,
        })  # fmt: skip
    return found


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None  # NaN is not smaller


def _convert_mib(count: float | None) -> int | None:
    return None if count is None else round(count * MIB)


class NvidiaSmiSampler:
    """The GPUs of this machine that the training may use, asked through nvidia-smi.

    Args:
        query: the command line.
    """

    def __init__(self, query: tuple[str, ...] = GPU_QUERY, wait_s: float = GPU_WAIT_S) -> None:
        self._query, self._wait_s = query, wait_s
        self._known: list[Gpu] = []
        self._asked: subprocess.Popen[str] | None = None
        """One that did not answer, and may not go away either: a process in the driver cannot be killed."""

    def sample(self) -> list[Gpu]:
        """How they are; without values, if the driver does not answer. Never raises."""
        if shutil.which(self._query[0]) is None:
            return []
        if self._asked is not None and self._asked.poll() is None:
            return self._unknown()
        self._asked = None
        try:
            asked = subprocess.Popen(
                self._query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True,
                errors="replace",
            )  # fmt: skip
        except OSError:
            return self._unknown()
        try:
            text, _ = asked.communicate(timeout=self._wait_s)
        except subprocess.TimeoutExpired:
            asked.kill()
            if asked.stdout:
                asked.stdout.close()
            self._asked = asked
            return self._unknown()
        found = parse_nvidia_smi(text, os.environ.get(VISIBLE))
        if len(found) >= len(self._known):
            self._known = found
            return found
        there = {gpu["index"] for gpu in found}
        return sorted(
            found + [gpu for gpu in self._unknown() if gpu["index"] not in there], key=lambda gpu: gpu["index"] or 0
        )

    def _unknown(self) -> list[Gpu]:
        """Those that were there, and nothing about them."""
        return [{name: value if name == "index" else None for name, value in gpu.items()} for gpu in self._known]


class UsageSampler:
    """What the machine and a worker use. CPU time is counted from one call to the next.

    Args:
        disk: a place on the disk that is looked at.
        gpus: asked too; None: no GPU is used.
    """

    def __init__(self, disk: Path, gpus: NvidiaSmiSampler | None) -> None:
        self._disk, self._gpus = disk, gpus
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._asked_s = time.monotonic()
        psutil.cpu_percent()

    def begin(self, worker: int) -> None:
        """Count from now, for this worker."""
        psutil.cpu_percent()
        self._worker(worker)

    def sample(self, worker: int) -> dict[str, Any]:
        """All of it, by the names of the event; what cannot be asked is None. Never raises."""
        cpu_percent, memory_bytes = self._worker(worker)
        found: dict[str, Any] = {"cpu_percent": psutil.cpu_percent()}
        for names, ask in (
            (("memory_bytes", "memory_percent"), self._memory),
            (("disk_used_percent",), lambda: (psutil.disk_usage(str(self._disk)).percent,)),
            (("network_received_bytes", "network_sent_bytes"), self._network),
        ):
            try:
                values: tuple[float | int | None, ...] = ask()
            except (OSError, psutil.Error, AttributeError):
                values = (None,) * len(names)
            found |= dict(zip(names, values, strict=True))
        gpus = [] if self._gpus is None else self._gpus.sample()
        return {**found, "worker_cpu_percent": cpu_percent, "worker_memory_bytes": memory_bytes, "gpus": gpus}

    @staticmethod
    def _memory() -> tuple[int, float]:
        memory = psutil.virtual_memory()
        return memory.total - memory.available, memory.percent

    @staticmethod
    def _network() -> tuple[int, int]:
        network = psutil.net_io_counters()
        return network.bytes_recv, network.bytes_sent

    def _worker(self, pid: int) -> tuple[float | None, int | None]:
        """Of it and its children: CPU time since the last call, in percent of the time of one CPU; and memory."""
        now_s, cpu_s, memory_bytes, used_s = time.monotonic(), {}, 0, 0.0
        with contextlib.suppress(OSError, psutil.Error):
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
                    key, times = (process.pid, process.create_time()), process.cpu_times()
                    cpu_s[key] = times.user + times.system
                    memory_bytes += process.memory_info().rss
                    used_s += cpu_s[key] - self._cpu_s.get(key, 0.0)
        passed_s, self._asked_s, self._cpu_s = now_s - self._asked_s, now_s, cpu_s
        if not cpu_s:
            return None, None
        return (round(100 * used_s / passed_s, 1) if passed_s > 0 else None), memory_bytes


class SystemMetricsSampler(threading.Thread):
    """Notes samples in the journal while there is a worker.

    Args:
        journal: is told.
        machine: says how often, and whether GPUs are used.
        worker: the process id of the worker of now; None: there is none.
        taken: how many samples the run has.
    """

    def __init__(self, journal: Journal, machine: Machine, worker: Callable[[], int | None], taken: int) -> None:
        super().__init__(name="system figures", daemon=True)
        self._journal, self._every_s, self._worker, self._taken = journal, machine.system_every_s, worker, taken
        self._usage = UsageSampler(journal.path.parent, NvidiaSmiSampler() if machine.device != "cpu" else None)
        self._over = threading.Event()

    def run(self) -> None:
        seen, due_s = None, 0.0
        while not self._over.wait(POLL_S):
            pid, now_s = self._worker(), time.monotonic()
            if pid is None:
                seen = None
            elif pid != seen:
                seen, due_s = pid, now_s + min(FIRST_S, self._every_s)
                self._usage.begin(pid)
            elif now_s >= due_s:
                due_s = now_s + self._every_s
                sample = self._usage.sample(pid)
                if self._worker() == pid and not self._over.is_set():  # else it tells of nobody
                    self._taken += 1
                    self._journal.append("system", sample=self._taken, **sample)

    def end(self) -> None:
        """No more samples; a disk or a driver that hangs is not waited for."""
        self._over.set()
        if self.is_alive():
            self.join(1.0)
