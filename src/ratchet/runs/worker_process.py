"""One attempt: starts a worker process and watches it until it ends. Imports no torch.

The worker is a child process. It shares the run directory, the lock of the run and one page of memory (heartbeat.py)
with the supervisor.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ratchet.config.machine import Machine
from ratchet.errors import EXIT_BUG
from ratchet.runs.directory import RunDirectory
from ratchet.runs.heartbeat import HangDetector, Heartbeat, dump_stacks_and_kill, read_process_state
from ratchet.runs.rendezvous import count_local_ranks, has_agent
from ratchet.runs.restart_policy import WorkerExit
from ratchet.runs.signals import StopSignal

WORKER = (sys.executable, "-m", "ratchet.training.worker_main")
AGENT = (sys.executable, "-m", "ratchet.training.elastic_agent")
POLL_S = 0.1
KILL_WAIT_S = 15.0
"""A process that waits for a device (state D) does not end when it is killed."""


def run_attempt(
    run: RunDirectory, machine: Machine, stop: StopSignal, poll: Callable[[], None], module: str | None = None
) -> WorkerExit:
    """Start a worker and wait for its end; kill it if it stalls.

    Args:
        run: opened; its journal has the number of this attempt.
        machine: settings with the deadlines.
        stop: a request to stop is passed on to the worker.
        poll: called a few times a second.
        module: started as the worker; None: that of a training.
    """
    count = count_local_ranks(machine)
    pages = [Heartbeat.create(machine.stall_timeout_s, machine.first_stall_timeout_s) for _ in range(count)]
    try:
        before = count_oom_kills()
        try:
            worker = _start_worker(run, pages, has_agent(machine), module)
        except OSError as error:  # no space for its log, or no process available: may pass
            return WorkerExit(EXIT_BUG, "storage", f"the worker could not be started: {error}")
        stop.worker = worker
        if stop.asked:
            stop.pass_on()
        try:
            detectors = [HangDetector(page, machine.grace_period_s) for page in pages]
            end = _watch_worker(worker, run, detectors, stop, poll)
        finally:
            stop.worker = None
        kills = max(after - earlier for after, earlier in zip(count_oom_kills(), before, strict=True))
        return WorkerExit(end.exit_code, end.failure, end.text, kills)
    finally:
        for page in pages:
            page.close()


def _start_worker(
    run: RunDirectory, pages: Sequence[Heartbeat], with_agent: bool, module: str | None
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # required for deterministic cuBLAS
    arguments = [str(run.paths.root), str(run.journal.attempt), str(os.getpid())]
    entry = WORKER if module is None else (sys.executable, "-m", module)
    command = [*entry, *arguments, str(pages[0].fd)]
    if with_agent:
        command = [*AGENT, *arguments, Heartbeat.address_of(pages), str(len(pages))]
    with run.paths.worker_log.open("ab") as log:
        # In its own session Ctrl-C reaches only the supervisor, which passes it on once. The worker inherits the lock,
        # so the run stays locked until both processes are gone. If the supervisor dies, the kernel kills the worker.
        return subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
            pass_fds=[run.lock.fd, pages[0].fd], start_new_session=True,
        )  # fmt: skip


def _watch_worker(
    worker: subprocess.Popen[bytes],
    run: RunDirectory,
    detectors: Sequence[HangDetector],
    stop: StopSignal,
    poll: Callable[[], None],
) -> WorkerExit:
    while (exit_code := _wait_for_worker(worker)) is None:
        poll()
        # Every detector is called each time: one that is not called would assume that the supervisor was suspended.
        stalled = {rank: reason for rank, found in enumerate(detectors) if (reason := found.overdue(stop.asked_s))}
        if stalled:
            rank, reason = next(iter(stalled.items()))
            has_ranks = len(detectors) > 1
            where = f"rank {rank} of this machine: " if has_ranks else ""
            stacks = dump_stacks_and_kill(worker, run.paths.stacks, rank if has_ranks else None)
            text = f"{where}{reason}; {stacks}"
            run.journal.append("alert", text=f"worker killed: {text}")
            return _wait_for_killed(worker, run, text, stop)
    return WorkerExit(exit_code)


def _wait_for_killed(worker: subprocess.Popen[bytes], run: RunDirectory, text: str, stop: StopSignal) -> WorkerExit:
    """Wait until a killed worker is gone. Until then it holds the lock, and no other worker may start."""
    since_s, is_reported = time.monotonic(), False
    while (exit_code := _wait_for_worker(worker)) is None:
        if time.monotonic() - since_s < KILL_WAIT_S:
            continue
        if not is_reported:
            is_reported = True
            state = read_process_state(worker.pid)
            run.journal.append("alert", text=f"process {worker.pid} was killed but does not end (state {state})")
        if stop.asked:
            return WorkerExit(-9, "stalled", f"{text}; process {worker.pid} was killed but does not end")
    # A worker that ended by itself in the meantime did not stall.
    return WorkerExit(exit_code, "stalled", text) if exit_code < 0 else WorkerExit(exit_code)


def _wait_for_worker(worker: subprocess.Popen[bytes]) -> int | None:
    """The exit code as soon as the worker has ended; None after POLL_S.

    Popen.wait with a timeout would poll eighty times a second, because it has no descriptor to sleep on.
    """
    if worker.poll() is None:
        try:
            fd = os.pidfd_open(worker.pid)
        except OSError:  # a kernel older than Linux 5.3, or no descriptor available
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
    """How many processes were killed for lack of memory so far: on this machine, and in this cgroup. 0 if unknown.

    Linux: vm_event_item OOM_KILL in /proc/vmstat; "memory.events" in Documentation/admin-guide/cgroup-v2.rst.
    """

    return _read_counter(vmstat), _read_counter(cgroup)


def _read_counter(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
