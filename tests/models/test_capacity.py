"""Tests measurements of available and held memory against the kernel's figures."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ratchet.models.memory import capacity

MIB = 2**20


HELD = """
import torch
from ratchet.models.memory import capacity

MIB = 2**20
assert capacity.reset_peak()
before = capacity.resident_bytes()
block = torch.ones(64 * MIB, dtype=torch.uint8)
held = capacity.resident_bytes() - before
del block
peak = capacity.peak_resident_bytes() - before
assert capacity.reset_peak()
print(held // MIB, peak // MIB, (capacity.peak_resident_bytes() - before) // MIB)
"""


def test_a_block_of_memory_is_seen_while_it_is_held_and_its_peak_after() -> None:
    """The measurement needs its own process: in this one, the memory of other tests may be freed at any moment."""
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    held, peak, forgotten = map(int, done.stdout.split())
    assert 60 < held < 80
    assert peak > 60
    assert forgotten < 30


def test_available_memory_counts_what_this_process_holds_already() -> None:
    found = capacity.measure_device(torch.device("cpu"))
    assert capacity.resident_bytes() < found.available_bytes <= found.total_bytes


@pytest.mark.parametrize(
    ("limit", "used", "statistics", "cache"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
    ids=["cgroup 2", "cgroup 1"],
)
def test_a_containers_limit_holds_and_its_file_cache_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, statistics: str, cache: str
) -> None:
    monkeypatch.setattr(capacity, "resident_bytes", lambda: 150 * MIB)
    (tmp_path / "memory").mkdir()
    most = 662 * MIB
    (tmp_path / limit).write_text(f"{most}\n")
    (tmp_path / used).write_text(f"{300 * MIB}\n")
    (tmp_path / statistics).write_text(f"anon 5\n{cache} {100 * MIB}\n")
    found = capacity.measure_host(tmp_path)
    assert found.total_bytes == most
    # The container uses 200 MiB without file cache; the memory of this process counts as available to it.
    assert found.available_bytes == most - 200 * MIB + 150 * MIB


def test_no_limit_is_the_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity.measure_host(tmp_path).total_bytes == capacity.measure_host(tmp_path / "none").total_bytes


def test_room_on_a_disk_that_is_to_hold_a_directory_not_made_yet(tmp_path: Path) -> None:
    assert capacity.disk_free_bytes(tmp_path / "a" / "b") > 0
