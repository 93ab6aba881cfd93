"""Tests of memory by phase: it is measured, reported once and again after growth, and produces warnings."""

from pathlib import Path

import torch

from ratchet.models.memory import capacity
from ratchet.runs.journal import Journal, JournalReader
from ratchet.training.memory_monitor import MemoryMonitor

CPU = torch.device("cpu")
MIB = 2**20


def told(path: Path, kind: str) -> list[dict[str, object]]:
    return [event.data for event in JournalReader(path).read() if event.kind == kind]


def test_each_phase_is_told_with_what_it_held_at_most(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    monitor = MemoryMonitor(Journal(path, 1), CPU, ())
    monitor.enter("loaded")
    block = torch.ones(96 * MIB, dtype=torch.uint8)
    del block
    monitor.enter("adapters")
    monitor.close()
    found = {str(event["phase"]): event for event in told(path, "memory_peak")}
    assert list(found) == ["baseline", "loaded", "adapters"]
    peaks = {name: int(str(event["peak_bytes"])) for name, event in found.items()}
    assert 80 * MIB < peaks["loaded"] - peaks["adapters"] < 140 * MIB
    assert found["loaded"]["device_bytes"] == capacity.measure_device(CPU).total_bytes
    assert monitor.peaks["loaded"].peak_bytes == peaks["loaded"]


def test_a_phase_that_comes_again_is_told_again_only_when_it_grew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    monitor = MemoryMonitor(Journal(path, 1), CPU, ())
    for _ in range(3):
        monitor.enter("steady")
        monitor.enter("evaluation")
    before = len(told(path, "memory_peak"))
    monitor.enter("steady")
    block = torch.ones(256 * MIB, dtype=torch.uint8)
    monitor.enter("evaluation")
    del block
    monitor.close()
    assert [event["phase"] for event in told(path, "memory_peak")][before] == "steady"
    assert before == 3


def test_a_fraction_of_the_memory_is_warned_of_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    monitor = MemoryMonitor(Journal(path, 1), CPU, (1e-9, 0.999))
    monitor.enter("loaded")
    monitor.enter("adapters")
    monitor.close()
    alerts = told(path, "alert")
    assert len(alerts) == 1
    assert "in phase baseline" in str(alerts[0]["text"])
    assert "due at" in str(alerts[0]["text"])
