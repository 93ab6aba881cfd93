"""Tests of system metrics: parsing, a hanging driver, and the sampling interval."""

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
from ratchet.runs.system_metrics import (
    GPU_QUERY,
    NvidiaSmiSampler,
    SystemMetricsSampler,
    UsageSampler,
    parse_nvidia_smi,
)

WELL = """\
0, GPU-5c3b1f60-0000-1111-2222-333344445555, 97, 81234, 143771, 512.34, 61
1, GPU-a9f0e1d2-0000-1111-2222-333344445555, 0, 0, 143771, 71.02, 28
"""
SICK = """\
0, GPU-5c3b1f60-0000-1111-2222-333344445555, [N/A], [Unknown Error], 143771, [Not Supported], [N/A]
Unable to determine the device handle for GPU1: 0000:3B:00.0: Unknown Error
1, GPU-a9f0e1d2-0000-1111-2222-333344445555, [GPU requires reset], nan, inf, , 28
2, GPU-a9f0e1d2
"""
MIB = 1 << 20


def test_what_the_driver_s_tool_says_becomes_numbers() -> None:
    first, second = parse_nvidia_smi(WELL)
    assert first == {
        "index": 0, "utilization_percent": 97.0, "memory_bytes": 81234 * MIB, "memory_total_bytes": 143771 * MIB,
        "power_w": 512.34, "temperature_c": 61.0,
    }  # fmt: skip
    assert (second["index"], second["memory_bytes"]) == (1, 0)


def test_what_it_does_not_know_is_none_and_what_is_no_gpu_is_left_out() -> None:
    first, second = parse_nvidia_smi(SICK)
    assert first == {
        "index": 0, "utilization_percent": None, "memory_bytes": None, "memory_total_bytes": 143771 * MIB,
        "power_w": None, "temperature_c": None,
    }  # fmt: skip
    assert second == dict.fromkeys(first) | {"index": 1, "temperature_c": 28.0}
    assert parse_nvidia_smi("No devices were found\n") == []
    assert parse_nvidia_smi("") == []
    assert parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == []


@pytest.mark.parametrize(
    ("visible", "there"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [0, 1]), ("", []), ("-1", []), ("0,-1,1", [0]), ("GPU-a9f0", [1]), ("7", [])],
)
def test_only_gpus_that_the_training_may_use_are_told_of(visible: str | None, there: list[int]) -> None:
    assert [gpu["index"] for gpu in parse_nvidia_smi(WELL, visible)] == there


def tool(folder: Path, script: str) -> tuple[str, ...]:
    """Write a script that replaces nvidia-smi; return its command line."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path), *GPU_QUERY[1:])


@pytest.fixture(autouse=True)
def _all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_tool_is_asked_for_what_is_read_and_without_it_there_are_no_gpus(tmp_path: Path) -> None:
    assert NvidiaSmiSampler((str(tmp_path / "nvidia-smi"),)).sample() == []
    query = tool(tmp_path, f'echo "$@" > {tmp_path}/asked; cat <<END\n{WELL}END')
    assert [gpu["index"] for gpu in NvidiaSmiSampler(query).sample()] == [0, 1]
    assert (tmp_path / "asked").read_text().split() == list(GPU_QUERY[1:])
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    assert NvidiaSmiSampler((str(tmp_path / "nvidia-smi"),)).sample() == []


def test_a_driver_that_hangs_is_not_waited_for_and_not_asked_again_until_it_lets_go(tmp_path: Path) -> None:
    query = tool(
        tmp_path, f"echo asked >> {tmp_path}/asked; test -e {tmp_path}/sick && exec sleep 3600\ncat <<END\n{WELL}END"
    )
    gpus = NvidiaSmiSampler(query, wait_s=30.0)
    assert len(gpus.sample()) == 2
    (tmp_path / "sick").touch()
    gpus._wait_s = 0.2
    unknown = gpus.sample()
    assert [gpu.pop("index") for gpu in unknown] == [0, 1]
    assert {value for gpu in unknown for value in gpu.values()} == {None}
    asked = gpus._hanging
    assert asked is not None
    asked.wait(PATIENCE_S)  # the sampler has killed it
    (tmp_path / "sick").unlink()
    gpus._wait_s = 30.0
    assert [gpu["power_w"] for gpu in gpus.sample()] == [512.34, 71.02]


def test_one_that_cannot_be_killed_is_let_alone(tmp_path: Path) -> None:
    query = tool(tmp_path, f"echo asked >> {tmp_path}/asked; cat <<END\n{WELL}END")
    gpus = NvidiaSmiSampler(query)
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
    query = tool(tmp_path, f"cat {tmp_path}/says")
    (tmp_path / "says").write_text(WELL)
    gpus = NvidiaSmiSampler(query)
    gpus.sample()
    (tmp_path / "says").write_text(
        "Unable to determine the device handle for GPU0: Unknown Error\n" + WELL.splitlines()[1]
    )
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
