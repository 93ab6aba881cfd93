"""Tests of system metrics: GPUs, a hanging driver, and the sampling interval."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metadata_server import PATIENCE_S, wait_until
from ratchet.config.machine import Machine
from ratchet.runs import system_metrics
from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.runs.status import RunProgress
from ratchet.runs.system_metrics import GpuSampler, SystemMetricsSampler, UsageSampler

VALUES = ("index", "utilization_percent", "used_bytes", "total_bytes", "power_w", "temperature_c")
FIRST = dict(zip(VALUES, (0, 97, 81, 143, 512.34, 61), strict=True))
SECOND = dict(zip(VALUES, (1, 0, 0, 143, 71.02, 28), strict=True))
BOTH = json.dumps({"devices": [FIRST, SECOND], "cuda": "12.6", "driver": "550.54", "problem": ""})
MIB = 1 << 20


def tool(folder: Path, script: str) -> tuple[str, ...]:
    """Write a script that replaces the query of the driver; return its command line."""
    path = folder / "query"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


def test_values_of_every_gpu_are_sampled(tmp_path: Path) -> None:
    first, second = GpuSampler(tool(tmp_path, f"cat <<END\n{BOTH}\nEND")).sample()
    assert first == {
        "index": 0, "utilization_percent": 97, "memory_bytes": 81, "memory_total_bytes": 143, "power_w": 512.34,
        "temperature_c": 61,
    }  # fmt: skip
    assert (second["index"], second["memory_bytes"]) == (1, 0)


def test_a_query_that_cannot_run_or_prints_something_else_gives_no_gpu(tmp_path: Path) -> None:
    assert GpuSampler((str(tmp_path / "query"),)).sample() == []
    assert GpuSampler(tool(tmp_path, "echo something else")).sample() == []
    assert GpuSampler(tool(tmp_path, "echo '{}'")).sample() == []
    (tmp_path / "query").write_bytes(b"\x7fELF of another machine")
    assert GpuSampler((str(tmp_path / "query"),)).sample() == []


def test_a_driver_that_hangs_is_not_waited_for_and_not_asked_again_until_it_lets_go(tmp_path: Path) -> None:
    query = tool(tmp_path, f"test -e {tmp_path}/sick && exec sleep 3600\ncat <<END\n{BOTH}\nEND")
    gpus = GpuSampler(query, wait_s=30.0)
    assert len(gpus.sample()) == 2
    (tmp_path / "sick").touch()
    gpus._wait_s = 0.2
    unknown = [dict(gpu) for gpu in gpus.sample()]
    assert [gpu.pop("index") for gpu in unknown] == [0, 1]
    assert {value for gpu in unknown for value in gpu.values()} == {None}
    asked = gpus._hanging
    assert asked is not None
    asked.wait(PATIENCE_S)  # the sampler has killed it
    (tmp_path / "sick").unlink()
    gpus._wait_s = 30.0
    assert [gpu["power_w"] for gpu in gpus.sample()] == [512.34, 71.02]


def test_one_that_cannot_be_killed_is_let_alone(tmp_path: Path) -> None:
    gpus = GpuSampler(tool(tmp_path, f"echo asked >> {tmp_path}/asked; cat <<END\n{BOTH}\nEND"))
    gpus.sample()
    stuck = subprocess.Popen(["sleep", "3600"], stdout=subprocess.PIPE, text=True)
    try:
        gpus._hanging = stuck
        assert [gpu["power_w"] for gpu in gpus.sample()] == [None, None]
        assert (tmp_path / "asked").read_text() == "asked\n"
    finally:
        stuck.kill()
        stuck.communicate()


def test_a_gpu_that_is_lost_stays_in_the_table_without_values(tmp_path: Path) -> None:
    gpus = GpuSampler(tool(tmp_path, f"cat {tmp_path}/says"))
    (tmp_path / "says").write_text(BOTH)
    gpus.sample()
    (tmp_path / "says").write_text(json.dumps({"devices": [SECOND], "cuda": "", "driver": "", "problem": ""}))
    assert [(gpu["index"], gpu["power_w"]) for gpu in gpus.sample()] == [(0, None), (1, 71.02)]


# --------------------------------------------------------------------------------------------------- machine and worker

BUSY = """
import subprocess, sys, time
code = "import time; x = bytearray(64 << 20); print('there', flush=True); time.sleep(3600)"
child = subprocess.Popen([sys.executable, "-c", code])
end = time.process_time() + 0.5
while time.process_time() < end: pass
print("done", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def worker() -> Iterator["subprocess.Popen[str]"]:
    """Start a worker that has used half a second of CPU time and has a child that holds 64 MiB."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield process
    os.killpg(process.pid, 9)
    process.communicate()


def test_what_worker_and_children_use_is_summed(worker: "subprocess.Popen[str]", tmp_path: Path) -> None:
    usage = UsageSampler(tmp_path, None)
    began_s = time.monotonic()
    assert worker.stdout is not None
    assert {worker.stdout.readline(), worker.stdout.readline()} == {"there\n", "done\n"}
    found = usage.sample(worker.pid)
    wall_s = time.monotonic() - began_s
    assert found["worker_memory_bytes"] > 64 * MIB
    assert found["worker_cpu_percent"] >= 0.9 * 100 * 0.5 / (wall_s + 1.0)
    assert 0 < found["memory_bytes"] < psutil.virtual_memory().total
    assert 0 < found["memory_percent"] <= 100
    assert 0 <= found["cpu_percent"] <= 100
    assert 0 < found["disk_used_percent"] <= 100
    assert found["network_received_bytes"] >= 0
    assert found["gpus"] == []


def test_what_cannot_be_asked_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)  # psutil returns None on a machine without a network
    found = UsageSampler(tmp_path / "gone", None).sample(ended.pid)
    nothing = {name for name, value in found.items() if value is None}
    assert nothing == {
        "disk_used_percent", "network_received_bytes", "network_sent_bytes", "worker_cpu_percent",
        "worker_memory_bytes",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- events


def samples(journal: Journal) -> list[JournalEvent]:
    return [event for event in JournalReader(journal.path).read() if event.kind == "system_metrics"]


def test_samples_are_told_while_there_is_a_worker_and_their_numbers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_metrics, "POLL_S", 0.01)
    journal = Journal(tmp_path / "journal.jsonl", attempt=2)
    there: list[int] = []
    sampler = SystemMetricsSampler(
        journal, Machine(device="cpu", system_metrics_interval_s=0.02), lambda: there[0] if there else None, 41
    )
    sampler.start()
    there.append(os.getpid())
    wait_until(lambda: len(samples(journal)) >= 2)
    there.clear()
    sampler.end()
    found = samples(journal)
    assert [event.data["sample"] for event in found] == list(range(42, 42 + len(found)))
    assert {event.attempt for event in found} == {2}
    assert set(found[0].data) == {
        "sample", "cpu_percent", "memory_bytes", "memory_percent", "disk_used_percent", "network_received_bytes",
        "network_sent_bytes", "worker_cpu_percent", "worker_memory_bytes", "gpus",
    }  # fmt: skip
    journal.close()


def test_a_disk_that_hangs_keeps_nobody_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "POLL_S", 0.01)
    hangs, lets_go = threading.Event(), threading.Event()

    def disk_usage(path: str) -> None:
        hangs.set()
        lets_go.wait(PATIENCE_S)
        raise OSError("Stale file handle")

    monkeypatch.setattr(psutil, "disk_usage", disk_usage)
    journal = Journal(tmp_path / "journal.jsonl", attempt=1)
    sampler = SystemMetricsSampler(journal, Machine(device="cpu", system_metrics_interval_s=0.01), os.getpid, 0)
    sampler.start()
    assert hangs.wait(PATIENCE_S)
    sampler.end()
    assert sampler.is_alive()
    lets_go.set()
    sampler.join()
    assert samples(journal) == [], "nobody is told after the end"
    journal.close()


def test_samples_do_not_count_as_progress() -> None:
    progress = RunProgress()
    progress.update(JournalEvent("attempt_started", 5.0, 1, {"pid": 1}))
    progress.update(JournalEvent("system_metrics", 9.0, 1, {"sample": 1}))
    assert progress.last_t == 5.0, "else an alert that nothing has happened would never come"
