"""Tests of GPU detection: the real loader loads a test driver, a C library with the functions of the CUDA driver."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ratchet.stages import machine_check
from ratchet.stages.machine_check import GpuDevice, GpuInventory

GIB = 2**30
DRIVER = """
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static int current;
int cuInit(unsigned flags) { if (HANGS) for (;;) pause(); return INIT; }
int cuDriverGetVersion(int *v) { *v = 12060; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *name, int length, int d) { snprintf(name, length, "Card %d", d); return 0; }
int cuDeviceGetAttribute(int *v, int which, int d) { *v = which == 75 ? 8 : which == 76 ? 9 : -1; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(size_t)(d + 1); return 0; }
int cuCtxSetCurrent(void *c) { current = (int)(size_t)c; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *total = (size_t)24 << 30; *free = (size_t)(current == 1 ? 23 : 10) << 30; return 0;
}
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
"""
MANAGEMENT = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, "550.54.15", length); return 0; }
"""


def made(folder: Path, init: int = 0, hangs: int = 0) -> Path:
    """Compile both driver libraries into `folder`; return the folder."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    for name, code in (("libcuda.so.1", DRIVER), ("libnvidia-ml.so.1", MANAGEMENT)):
        (folder / "code.c").write_text(code)
        options = [f"-DINIT={init}", f"-DHANGS={hangs}", "-shared", "-fPIC", "-w"]
        subprocess.run([compiler, *options, "-o", str(folder / name), str(folder / "code.c")], check=True)
    return folder


def test_every_gpu_is_found_with_its_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made(tmp_path)))
    assert machine_check.query_gpus() == GpuInventory(
        devices=(GpuDevice("Card 0", "8.9", 24 * GIB, 23 * GIB), GpuDevice("Card 1", "8.9", 24 * GIB, 10 * GIB)),
        cuda="12.6", driver="550.54.15",
    )  # fmt: skip


def test_a_driver_that_refuses_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made(tmp_path, init=999)))
    assert machine_check.query_gpus() == GpuInventory(
        driver="550.54.15", problem="cuInit failed with error 999 of the CUDA driver"
    )


def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made(tmp_path, hangs=1)))
    assert machine_check.query_gpus(timeout_s=1.0) == GpuInventory(problem="the driver did not answer within 1 s")


def test_a_file_that_is_not_a_library_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = machine_check.query_gpus()
    assert found.devices == ()
    assert found.problem
