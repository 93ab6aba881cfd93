"""Is the worker alive? Reads its heartbeat, and puts down one that has stalled, after it has told what it was doing."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ratchet.runs.heartbeat import Heartbeat

STOP_EXTRA_S = 15.0
"""Beyond the grace: a worker that was asked to stop, and neither ends nor shows life for so long, is killed."""

BLIND_S = 2.0
"""When we have not looked for longer than this, we were stopped ourselves, and perhaps the worker with us."""

DUMP_WAIT_S = 2.0
DUMP_POLL_S = 0.05

_STATES = {
    "T": "it was stopped by a signal",
    "t": "a debugger holds it",
    "D": "it waits for a disk or a device",
    "Z": "it had ended",
}


class Watch:
    """Judges one worker's heartbeat.

    Args:
        heartbeat: of the worker.
        grace_s: `machine.grace_s`.
        clock: monotonic seconds.
    """

    def __init__(self, heartbeat: Heartbeat, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat = heartbeat
        self._grace_s = grace_s
        self._clock = clock
        self._looked_s = clock()
        self._blind_s = 0.0
        self._number = 0

    def overdue(self, asked_s: float | None = None) -> str:
        """Why the worker has to be given up, or nothing.

        Time in which nobody looked is not held against it: a container that was paused stops both of us.

        Args:
            asked_s: when it was asked to stop, by the same clock.
        """
        now_s = self._clock()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        beat = self._heartbeat.read()
        if beat.number != self._number:
            self._number, self._blind_s = beat.number, 0.0
        if gap_s > BLIND_S:
            self._blind_s += min(gap_s, beat.age_s)
        silent_s = beat.age_s - self._blind_s
        silence = f"no sign of life for {silent_s:.3g} s in phase {beat.phase}"
        if beat.deadline_s and silent_s > beat.deadline_s:
            return f"{silence} (deadline {beat.deadline_s:.3g} s)"
        if asked_s is not None:
            waited_s = now_s - asked_s - self._blind_s
            if waited_s > self._grace_s + STOP_EXTRA_S and silent_s > STOP_EXTRA_S:
                return f"asked to stop {waited_s:.3g} s ago; {silence}"
        return ""


def put_down(worker: subprocess.Popen[bytes], stacks: Path, rank: int | None = None) -> str:
    """Let the worker write what its threads are doing (training/start.py: faulthandler on SIGUSR1), then kill it.

    faulthandler needs no interpreter lock, so a thread that holds it for ever is shown too. A stopped process takes
    signals only when it goes on, hence SIGCONT.

    Args:
        worker: to be killed; what it has started dies with it.
        stacks: where those of its threads are written.
        rank: the process that is to tell is its child of this LOCAL_RANK; None: the worker itself.

    Returns:
        What was found, such as `it was stopped by a signal; stacks in PATH`.
    """
    pid = worker.pid if rank is None else _child(worker.pid, rank)
    state = state_of(pid) if pid else ""
    size = _size(stacks)
    if state and state != "Z":
        os.kill(pid, signal.SIGUSR1)
        if state == "T":
            os.kill(pid, signal.SIGCONT)
    told = _grows(worker, stacks, size)
    worker.kill()
    found = [_STATES[state]] if state in _STATES else []
    found.append(f"stacks in {stacks}" if told else "it wrote no stacks")
    return "; ".join(found)


def state_of(pid: int) -> str:
    """The letter for a process's state in /proc/PID/stat (proc_pid_stat(5)); nothing when it is gone."""
    try:
        # The name in brackets may hold anything, also brackets: the state follows the last one.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def _child(parent: int, rank: int) -> int:
    """The child with this LOCAL_RANK in its environment; 0 when there is none."""
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, children.read_text(encoding="ascii").split()):
            with contextlib.suppress(OSError):
                if f"LOCAL_RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
    return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _grows(worker: subprocess.Popen[bytes], path: Path, size: int) -> bool:
    """Whether the file grows within DUMP_WAIT_S; waits until it has stopped growing."""
    deadline_s = time.monotonic() + DUMP_WAIT_S
    seen = size
    while time.monotonic() < deadline_s and worker.poll() is None:
        time.sleep(DUMP_POLL_S)
        now = _size(path)
        if now > size and now == seen:
            break
        seen = now
    return _size(path) > size
