"""Tests of graceful shutdown with real processes and signals, and with a main thread that is busy in C."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ratchet.errors import EXIT_INTERRUPTED

# The main thread computes for minutes in one C call, as a backward pass does. The GIL is free.
SCRIPT = """
import hashlib, os, pathlib, sys
from ratchet.runs.signals import GracefulShutdown
stop = GracefulShutdown().install()
def seal():
    pathlib.Path(sys.argv[1]).write_text("sealed")
    os._exit(75)
if "arm" in sys.argv:
    stop.arm(1.0, seal)
print("ready", flush=True)
if "busy" in sys.argv:
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)
while not stop.is_requested:
    pass
stop.acknowledge()
print("noticed", flush=True)
import time
time.sleep(3 if "slow" in sys.argv else 0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("times", [1, 3])
def test_a_busy_main_thread_is_not_waited_for(tmp_path: Path, number: signal.Signals, times: int) -> None:
    process = started(tmp_path, "arm", "busy")
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.05)
    assert ended(process) == EXIT_INTERRUPTED
    assert (tmp_path / "sealed").read_text() == "sealed"


def test_a_main_thread_that_notices_is_left_to_it(tmp_path: Path) -> None:
    process = started(tmp_path, "arm", "slow")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0  # it took longer than the grace period and was not interrupted
    assert not (tmp_path / "sealed").exists()


def test_before_there_is_anything_to_save_the_process_just_ends(tmp_path: Path) -> None:
    process = started(tmp_path, "busy")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == EXIT_INTERRUPTED


def started(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "sealed"), *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=30)
    return process.returncode


# Starts a command as dvc does, with this shell, and ends.
STARTER = """
import os, subprocess, sys
subprocess.Popen([sys.argv[1], "-c", sys.argv[2]])
sys.stdin.readline()
os._exit(1)
"""
CHILD = """
import os, signal
from ratchet.runs.signals import die_with_starter
signal.signal(signal.SIGTERM, lambda *_: os._exit(os.write(1, b"asked to stop\\n")))
die_with_starter(signal.SIGTERM)
os.write(1, b"ready\\n")
signal.pause()
"""


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize("stays", [False, True], ids=["replaces itself", "stays"])
def test_the_end_of_the_program_that_started_the_shell_is_noticed(tmp_path: Path, shell: str, stays: bool) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    command = f"{sys.executable} {tmp_path / 'child.py'}" + ("; true" if stays else "")
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, shell, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "ready\n"
        starter.kill()
        assert starter.stdout.readline() == "asked to stop\n"
