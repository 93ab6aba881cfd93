"""One attempt: a worker process from its start to its end, watched. Imports no torch.

The worker is a child process that shares with us the run directory, its lock, and one page of memory (heartbeat.py).
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ratchet.config.schema import Machine
from ratchet.errors import EXIT_BUG
from ratchet.runs.directory import Run
from ratchet.runs.heartbeat import HangDetector, Heartbeat, dump_stacks_and_kill, read_process_state
from ratchet.runs.rendezvous import count_local_ranks, has_agent
from ratchet.runs.restart_policy import WorkerExit
from ratchet.runs.signals import StopSignal

WORKER = (sys.executable, "-m", "ratchet.training.worker_main")
AGENT = (sys.executable, "-m", "ratchet.training.elastic_agent")
POLL_S = 0.1
KILL_WAIT_S = 15.0
"""A process that waits for a device (state D) does not go away when it is killed."""


def run_attempt(
    run: Run, machine: Machine, stop: StopSignal, look: Callable[[], None], module: str | None = None
) -> WorkerExit:
    """Start a worker and wait for its end, or bring it about when it has stalled.

    Args:
        run: opened; its journal has the number of this attempt.
        machine: with the deadlines.
        stop: a request is passed on to the worker.
        look: called a few times a second.
        module: started as the worker; None: a training's.
    """
    count = count_local_ranks(machine)
    pages = [Heartbeat.create(machine.stall_s, machine.stall_first_s) for _ in range(count)]
    try:
        before = count_oom_kills()
        try:
            worker = _start_worker(run, pages, has_agent(machine), module)
        except OSError as error:  # no room for its log, no process to be had: that may pass
            return WorkerExit(EXIT_BUG, "storage", f"the worker could not be started: {error}")
        stop.worker = worker
        if stop.asked:
            stop.pass_on()
        try:
            end = _watch_worker(worker, run, [HangDetector(page, machine.grace_s) for page in pages], stop, look)
        finally:
            stop.worker = None
        kills = max(after - earlier for after, earlier in zip(count_oom_kills(), before, strict=True))
        return WorkerExit(end.exit_code, end.failure, end.text, kills)
    finally:
        for page in pages:
            page.close()


def _start_worker(
    run: Run, pages: Sequence[Heartbeat], with_agent: bool, module: str | None
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS is deterministic only with this
    arguments = [str(run.paths.root), str(run.journal.attempt), str(os.getpid())]
    entry = WORKER if module is None else (sys.executable, "-m", module)
    line = [*entry, *arguments, str(pages[0].fd)]
    if with_agent:
        line = [*AGENT, *arguments, Heartbeat.address_of(pages), str(len(pages))]
    with run.paths.worker_log.open("ab") as log:
        # A session of its own: Ctrl-C reaches us alone, and we pass it on once. The worker inherits the lock, so the
        # run stays locked until both of us are gone; if we die, the kernel kills it (see training/start.py).
        return subprocess.Popen(
            line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
            pass_fds=[run.lock.fd, pages[0].fd], start_new_session=True,
        )  # fmt: skip


def _watch_worker(
    worker: subprocess.Popen[bytes],
    run: Run,
    watches: Sequence[HangDetector],
    stop: StopSignal,
    look: Callable[[], None],
) -> WorkerExit:
    while (exit_code := _wait_for_worker(worker)) is None:
        look()
        # All are asked, each time: a watch that is not looked at would take that for blindness.
        silent = {rank: reason for rank, watch in enumerate(watches) if (reason := watch.overdue(stop.asked_s))}
        if silent:
            rank, reason = next(iter(silent.items()))
            where = f"rank {rank} of this machine: " if len(watches) > 1 else ""
            text = (
                f"{where}{reason}; {dump_stacks_and_kill(worker, run.paths.stacks, rank if len(watches) > 1 else None)}"
            )
            run.journal.append("alert", text=f"worker killed: {text}")
            return _kill_worker(worker, run, text, stop)
    return WorkerExit(exit_code)


def _kill_worker(worker: subprocess.Popen[bytes], run: Run, text: str, stop: StopSignal) -> WorkerExit:
    """The end of a worker that was killed. While it is not gone nobody may take its place: it has the lock."""
    since_s, told = time.monotonic(), False
    while (exit_code := _wait_for_worker(worker)) is None:
        if time.monotonic() - since_s < KILL_WAIT_S:
            continue
        if not told:
            told = True
            state = read_process_state(worker.pid)
            run.journal.append("alert", text=f"process {worker.pid} was killed and does not go away (state {state})")
        if stop.asked:
            return WorkerExit(-9, "stalled", f"{text}; process {worker.pid} was killed and does not go away")
    # One that ended by itself while we were looking did not stall.
    return WorkerExit(exit_code, "stalled", text) if exit_code < 0 else WorkerExit(exit_code)


def _wait_for_worker(worker: subprocess.Popen[bytes]) -> int | None:
    """The exit code, as soon as there is one; None after POLL_S.

    Popen.wait with a timeout would ask eighty times a second: it has no descriptor to sleep on.
    """
    if worker.poll() is None:
        try:
            fd = os.pidfd_open(worker.pid)
        except OSError:  # a kernel older than Linux 5.3, or no descriptor to be had
            time.sleep(POLL_S)
        else:
            try:
                select.select([fd], [], [], POLL_S)
            finally:
                os.close(fd)
    return worker.poll()


def count_oom_kills(
    vmstat: Path = Path("/proc/vmstat"), cgroup: Path = Path("/sys/fs/cgroup/memory.events")
) -> tuple[int, int]:
    """How many processes were killed for memory so far: on this machine, and in this cgroup; 0 where it is not told.

    Linux: vm_event_item OOM_KILL in /proc/vmstat; "memory.events" in Documentation/admin-guide/cgroup-v2.rst.
    """
    return _read_counter(vmstat), _read_counter(cgroup)


def _read_counter(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
