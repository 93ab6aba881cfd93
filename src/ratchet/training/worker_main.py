"""Entry point of a worker: `python -m ratchet.training.worker_main RUN_DIRECTORY ATTEMPT PARENT_PID HEARTBEAT`.

This module starts a training; inference/worker_main.py uses the same `run_process` for generation. HEARTBEAT is a file
descriptor, or the address of the heartbeats of several ranks (Heartbeat.address_of). The parent is the supervisor, its
fork server (runs/fork_server.py), or the agent that starts the ranks of a machine.

The module does not import torch, which takes seconds: first it arranges that the process dies with its parent.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ratchet.errors import EXIT_INTERRUPTED
from ratchet.runs import log
from ratchet.runs.directory import LaunchSpec, RunPaths, TrainingLaunchSpec
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.signals import GracefulShutdown, die_with_parent

Work = Callable[[RunPaths, int, GracefulShutdown, Heartbeat], int]
"""Function of run directory, attempt number, stop requests and heartbeat that returns the exit code."""


def run_process(arguments: list[str], launch_type: type[LaunchSpec], load_work: Callable[[], Work]) -> int:
    """Do the work of a worker, then end the process. Return an exit code only if the parent has died.

    Args:
        arguments: arguments of the command line.
        launch_type: type of the run's launch.json.
        load_work: imports the work, which takes seconds. It is called when the process is sure to die with its parent.
    """
    paths, attempt, parent = RunPaths(Path(arguments[0])), int(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before `die_with_parent` took effect
        return EXIT_INTERRUPTED
    shutdown = GracefulShutdown().install()
    machine = launch_type.load(paths.launch).machine
    rank = int(os.environ["RANK"]) if ":" in arguments[3] else None
    output = log.capture_output(paths.logs, machine, attempt, rank)
    limits = machine.stall_timeout_s, machine.first_stall_timeout_s
    if rank is not None:
        heartbeat = Heartbeat.attach_at(arguments[3], int(os.environ["LOCAL_RANK"]), *limits)
    else:
        heartbeat = Heartbeat(int(arguments[3]), *limits)
    heartbeat.beat("load")
    # The supervisor asks a worker without heartbeat for the stack of every thread before it kills it. faulthandler
    # is C code and works without the GIL.
    stacks = paths.stacks.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    exit_code = load_work()(paths, attempt, shutdown, heartbeat)
    output.end()
    os._exit(exit_code)  # all data is on disk; torch's shutdown takes seconds, without heartbeats


def _load_training_worker() -> Work:
    from ratchet.models import lazy_imports

    lazy_imports.import_model_libraries(in_own_process=True)
    with lazy_imports.pause_garbage_collection():
        from ratchet.training.worker import run_worker

    return run_worker


def main(arguments: list[str]) -> int:
    """Train a run (see `run_process`)."""
    return run_process(arguments, TrainingLaunchSpec, _load_training_worker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
