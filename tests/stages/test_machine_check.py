"""Tests of the comparison of requirements with this machine, and with simulated GPUs and networks."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet.errors import ReplicaError
from ratchet.runs.gpus import GpuInventory, GpuReading
from ratchet.stages import machine_check
from ratchet.stages.machine_check import RequirementResult, TransferSpeed, check_requirements, parse_requirements

GB = 10**9
TWO = GpuInventory(
    devices=(GpuReading("A", 24 * GB, 23 * GB), GpuReading("B", 24 * GB, 10 * GB)),
    cuda="12.6",
    driver="550.54",
)
NONE = GpuInventory(problem="libnvidia-ml.so.1 is not there")


def unreachable() -> TransferSpeed:
    raise ReplicaError("the replica cannot be reached")


def findings(
    folder: Path, wanted: str, gpus: GpuInventory = NONE, network: Callable[[], TransferSpeed] = unreachable
) -> dict[str, RequirementResult]:
    results = check_requirements(parse_requirements(wanted), folder, network, lambda: gpus)
    return {one.name: one for one in results}


def test_this_machine_meets_minimal_requirements(tmp_path: Path) -> None:
    found = findings(tmp_path / "runs", "ram=1MiB,cpus=1,disk=1kB,python=3.11")
    assert {name for name, one in found.items() if one.ok} == {"ram", "cpus", "disk", "python"}
    assert list((tmp_path / "runs").iterdir()) == []


def test_this_machine_does_not_meet_excessive_requirements(tmp_path: Path) -> None:
    found = findings(tmp_path, "ram=9999TiB,cpus=999999,disk=9999TiB,python=3.999,vram=1GB,gpus=1,cuda=1,driver=1")
    assert not any(one.ok for one in found.values())
    assert found["vram"].found == NONE.problem


def test_a_disk_that_cannot_be_written_does_not_count(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        folder = Path("/proc/ratchet-runs")  # root can write to every other directory
    else:
        folder = tmp_path / "runs"
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    found = findings(folder, "disk=1kB")["disk"]
    assert not found.ok
    assert "cannot be written" in found.found


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        ("vram=22GB,gpus=1,cuda=12.6,driver=550", set[str]()),
        ("vram=22GB", set()),
        ("vram=22GB,gpus=2", {"vram"}),
        ("vram=10GB,gpus=2", set()),
        ("vram=10GB,gpus=3", {"gpus"}),
        ("cuda=12.10", {"cuda"}),
        ("cuda=12", set()),
        ("cuda=12.6.1", {"cuda"}),
        ("driver=550.54,cuda=11.8", set()),
        ("driver=551", {"driver"}),
    ],
)
def test_gpus_are_counted_and_versions_compared_as_versions(tmp_path: Path, wanted: str, missing: set[str]) -> None:
    found = findings(tmp_path, wanted, TWO)
    assert {name for name, one in found.items() if not one.ok} == missing


def test_the_network_is_measured_once_and_only_when_asked_for(tmp_path: Path) -> None:
    measured: list[TransferSpeed] = []

    def network() -> TransferSpeed:
        measured.append(TransferSpeed(upload_bits_s=19e6, download_bits_s=80e6))
        return measured[-1]

    assert findings(tmp_path, "cpus=1", network=network)["cpus"].ok
    assert measured == []
    found = findings(tmp_path, "upload=20Mbps,download=50Mbps", network=network)
    assert (found["upload"].ok, found["download"].ok) == (False, True)
    assert found["upload"].found == "19.0 Mbps"
    assert len(measured) == 1


def test_a_network_that_does_not_reach_the_replica_is_not_good_enough(tmp_path: Path) -> None:
    found = findings(tmp_path, "upload=20Mbps,cpus=1")
    assert (found["upload"].ok, found["cpus"].ok) == (False, True)
    assert found["upload"].found == "the replica cannot be reached"


@pytest.mark.parametrize(
    ("second", "first", "most"),
    [("150000 100000", None, 1), ("max 100000", None, None), (None, ("50000", "100000"), 1), (None, ("-1", "1"), None)],
)
def test_cpu_quota_of_a_container_counts(
    tmp_path: Path, second: str | None, first: tuple[str, str] | None, most: int | None
) -> None:
    paths = tmp_path / "cpu.max", tmp_path / "quota", tmp_path / "period"
    texts = (second, *(first or (None, None)))
    for path, text in zip(paths, texts, strict=True):
        if text is not None:
            path.write_text(text)
    assert machine_check.available_cpus(*paths) == (most or len(os.sched_getaffinity(0)))
