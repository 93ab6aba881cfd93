"""Stalled workers are detected, write their stacks and are killed. Slow workers are left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.runs.heartbeat import (
    STOP_EXTRA_S,
    HangDetector,
    Heartbeat,
    HeartbeatReading,
    dump_stacks_and_kill,
    read_process_state,
)


class Told(Heartbeat):
    """Heartbeat with a last beat and a clock that the test sets."""

    def __init__(self) -> None:
        super().__init__(None, 0.0, 0.0)
        self.now_s = 1000.0
        self.beats = 0
        self.since_s = self.now_s
        self.deadline_s = 10.0

    def tell(self, deadline_s: float = 10.0) -> None:
        self.beats += 1
        self.since_s = self.now_s
        self.deadline_s = deadline_s

    def read(self) -> HeartbeatReading:
        return HeartbeatReading(self.beats, "step", self.now_s - self.since_s, self.deadline_s)


@pytest.fixture
def told() -> Told:
    heartbeat = Told()
    heartbeat.tell()
    return heartbeat


@pytest.fixture
def watch(told: Told) -> HangDetector:
    return HangDetector(told, 30.0, lambda: told.now_s)


def after(told: Told, watch: HangDetector, seconds: float, asked_s: float | None = None) -> str:
    """Return the first message of the detector, which checks twice a second for `seconds`."""
    found = ""
    for _ in range(round(seconds * 2)):
        told.now_s += 0.5
        found = found or watch.overdue(asked_s)
    return found


def test_worker_is_overdue_beyond_the_deadline_of_its_last_beat_if_there_is_one(
    told: Told, watch: HangDetector
) -> None:
    assert after(told, watch, 10.0) == ""
    assert after(told, watch, 1.0) == "no heartbeat for 10.5 s in phase step (deadline 10 s)"
    for _ in range(5):
        told.tell()
        assert after(told, watch, 9.0) == ""
    told.tell(deadline_s=0.0)
    assert after(told, watch, 5000.0) == ""


@pytest.mark.parametrize(("beats", "spare_s"), [(False, 4.0), (True, 9.0)], ids=["no beat", "a beat just before"])
def test_pause_of_both_processes_does_not_count_against_the_worker(
    told: Told, watch: HangDetector, beats: bool, spare_s: float
) -> None:
    assert after(told, watch, 5.0) == ""
    if beats:
        told.now_s += 0.1
        told.tell()
    told.now_s += 3600
    assert watch.overdue() == ""
    assert after(told, watch, spare_s) == ""
    assert "no heartbeat" in after(told, watch, 2.0)


def test_one_that_was_asked_to_stop_and_lives_has_all_the_time_it_needs(told: Told, watch: HangDetector) -> None:
    asked_s = told.now_s
    for _ in range(20):
        assert after(told, watch, 9.0, asked_s) == ""
        told.tell()


def test_dead_worker_that_was_asked_to_stop_is_given_up_after_the_grace(told: Told, watch: HangDetector) -> None:
    asked_s = told.now_s
    told.tell(deadline_s=1800.0)
    assert after(told, watch, 30.0 + STOP_EXTRA_S, asked_s) == ""
    assert after(told, watch, 1.0, asked_s) == "asked to stop 45.5 s ago; no heartbeat for 45.5 s in phase step"


def test_beat_late_in_the_grace_extends_it(told: Told, watch: HangDetector) -> None:
    asked_s = told.now_s
    told.tell(deadline_s=1800.0)
    assert after(told, watch, 44.0, asked_s) == ""
    told.tell(deadline_s=1800.0)
    assert after(told, watch, STOP_EXTRA_S, asked_s) == ""
    assert "asked to stop" in after(told, watch, 1.0, asked_s)


# ---------------------------------------------------------------------------------------------------- real processes

BEGIN = """
import faulthandler, signal, sys, os, time, threading, ctypes
from ratchet.runs.heartbeat import Heartbeat
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[2], "a"), all_threads=True)
heartbeat = Heartbeat(int(sys.argv[1]), 0.2, 0.2)
heartbeat.beat("step")
def say(): print("go", flush=True)
"""

STOPPED = """
def work_that_is_stopped():
    say()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)
work_that_is_stopped()
"""

# The thread locks a mutex twice in a call that keeps the GIL, so no thread runs Python again.
HOLDS_THE_GIL = """
def work_that_keeps_the_lock():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
    say()
    lock(mutex)
    lock(mutex)
work_that_keeps_the_lock()
"""

DEADLOCKED = """
lock = threading.Lock()
def work_that_waits_for_itself():
    lock.acquire()
    say()
    lock.acquire()
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
work_that_waits_for_itself()
"""

DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def work_that_hears_nothing():
    say()
    while True: time.sleep(3600)
work_that_hears_nothing()
"""

Start = Callable[[str], tuple[subprocess.Popen[bytes], Heartbeat, Path]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[tuple[subprocess.Popen[bytes], Heartbeat]] = []

    def start_it(code: str) -> tuple[subprocess.Popen[bytes], Heartbeat, Path]:
        heartbeat, stacks = Heartbeat.create(0.2, 60.0), tmp_path / "stacks.txt"
        command = [sys.executable, "-c", code, str(heartbeat.fd), str(stacks)]
        process = subprocess.Popen(command, pass_fds=[heartbeat.fd], stdout=subprocess.PIPE)
        begun.append((process, heartbeat))
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        return process, heartbeat, stacks

    yield start_it
    for process, heartbeat in begun:
        process.kill()
        process.wait()
        process.stdout.close()
        heartbeat.close()


@pytest.mark.parametrize(
    ("code", "works_in", "threads", "says"),
    [
        (BEGIN + STOPPED, "work_that_is_stopped", 1, "it was stopped by a signal; stacks in "),
        (BEGIN + HOLDS_THE_GIL, "work_that_keeps_the_lock", 1, "stacks in "),
        (BEGIN + DEADLOCKED, "work_that_waits_for_itself", 2, "stacks in "),
        (BEGIN + DEAF, "work_that_hears_nothing", 1, "stacks in "),
    ],
    ids=["stopped", "holds the GIL", "deadlocked", "deaf to SIGTERM"],
)
def test_stalled_worker_writes_its_stacks_and_is_killed(
    start: Start, code: str, works_in: str, threads: int, says: str
) -> None:
    process, heartbeat, stacks = start(code)
    if works_in == "work_that_is_stopped":
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    watch = HangDetector(heartbeat, 30.0)
    while not (reason := watch.overdue()):
        assert process.poll() is None
    assert "in phase step (deadline 0.2 s)" in reason
    text = dump_stacks_and_kill(process, stacks)
    assert process.wait() == -signal.SIGKILL
    assert text == f"{says}{stacks}"
    assert works_in in stacks.read_text()
    assert stacks.read_text().count("(most recent call first)") == threads


IGNORES = "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
SLEEPS = "print('go', flush=True)\nimport time\nwhile True: time.sleep(3600)"


@pytest.mark.parametrize("code", [IGNORES + SLEEPS, SLEEPS], ids=["ignores the signal", "has no handler yet"])
def test_worker_that_writes_no_stacks_is_killed_and_earlier_stacks_are_kept(start: Start, code: str) -> None:
    process, _, stacks = start(code)
    stacks.write_text("of an earlier one\n")
    assert dump_stacks_and_kill(process, stacks) == "it wrote no stacks"
    assert process.wait() in ((-signal.SIGKILL,) if code.startswith(IGNORES) else (-signal.SIGUSR1, -signal.SIGKILL))
    assert stacks.read_text() == "of an earlier one\n"


def test_the_state_of_a_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    odd = tmp_path / "a) R (b"
    odd.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(odd), "60"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert read_process_state(process.pid) == "stopped"
    finally:
        process.kill()
        process.wait()
    assert read_process_state(process.pid) == ""
