"""Tests of GPU detection: nvidia-ml-py loads a test driver, a C library with the functions of NVML."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ratchet.runs import gpus
from ratchet.runs.gpus import GpuInventory, GpuReading

GIB = 2**30
NVML = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Rates;
static char handles[4];
#define INDEX(h) ((int)((char *)(h) - handles))
int nvmlInitWithFlags(unsigned flags) { if (HANGS) for (;;) pause(); return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "Driver Not Loaded"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, "550.54.15", length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12060; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index == 2) return 15;  /* NVML_ERROR_GPU_IS_LOST */
    *handle = handles + index; return 0;
}
int nvmlDeviceGetName(void *h, char *text, unsigned length) { snprintf(text, length, "Card %d", INDEX(h)); return 0; }
int nvmlDeviceGetUUID(void *h, char *text, unsigned length) { snprintf(text, length, "GPU-a%d", INDEX(h)); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, Memory *m) {
    m->total = 24ULL << 30; m->free = (INDEX(h) ? 10ULL : 23ULL) << 30; m->used = m->total - m->free; return 0;
}
int nvmlDeviceGetUtilizationRates(void *h, Rates *r) { r->gpu = 97 * !INDEX(h); return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *milliwatts) { *milliwatts = 512340; return INDEX(h) ? 3 : 0; }
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *degrees) { *degrees = 61; return 0; }
"""
FIRST = GpuReading("Card 0", 24 * GIB, 23 * GIB, 0, "GPU-a0", 97, GIB, 512.34, 61)
SECOND = GpuReading("Card 1", 24 * GIB, 10 * GIB, 1, "GPU-a1", 0, 14 * GIB, None, 61)  # without its power
LOST = GpuReading(index=2)


@pytest.fixture(autouse=True)
def _all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def use_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, init: int = 0, hangs: int = 0) -> None:
    """Compile the test driver, and let processes that start from now on load it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: install gcc")
    (folder / "code.c").write_text(NVML)
    options = [f"-DINIT={init}", f"-DHANGS={hangs}", "-shared", "-fPIC", "-w", "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run([compiler, *options, str(folder / "code.c")], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


def test_every_gpu_is_found_with_what_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(tmp_path, monkeypatch)
    assert gpus.query_gpus() == GpuInventory((FIRST, SECOND, LOST), "12.6", "550.54.15")


@pytest.mark.parametrize(
    ("visible", "found"),
    [("1", [1]), ("1,0", [0, 1]), ("", []), ("-1", []), ("0,-1,1", [0]), ("GPU-a1", [1]), ("7", []), ("2", [2])],
)
def test_only_gpus_that_a_training_may_use_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, found: list[int]
) -> None:
    use_driver(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    inventory = gpus.query_gpus()
    assert [device.index for device in inventory.devices] == found
    assert inventory.problem == ("" if found else "no usable GPU")


def test_a_driver_that_does_not_work_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(tmp_path, monkeypatch, init=9)
    assert gpus.query_gpus() == GpuInventory(problem="the driver does not work: Driver Not Loaded")


def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(tmp_path, monkeypatch, hangs=1)
    assert gpus.query_gpus(timeout_s=1.0) == GpuInventory(problem="the driver did not answer within 1 s")


def test_a_file_that_is_not_a_library_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    problem = "no NVIDIA driver (libnvidia-ml.so.1), or a container without access to it"
    assert gpus.query_gpus() == GpuInventory(problem=problem)


@pytest.mark.parametrize(("visible", "count"), [(None, 3), ("0,2", 2), ("", 0), ("1,-1,2", 1), ("GPU-a0", 1)])
def test_gpus_are_counted_without_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.count_visible_gpus(tmp_path) == len(gpus.list_visible_gpus(tmp_path)) == count
