"""Entry of a worker: `python -m ratchet.training.worker_main RUN_DIRECTORY ATTEMPT PARENT_PID HEARTBEAT`.

The caller chooses the work: training here, generation in inference/worker_main.py.

HEARTBEAT is a descriptor, or where those of several ranks are found (heartbeat.py: address_of). The parent is the
supervisor, or the agent that starts the ranks of a machine.

Light on purpose: its first act is to tie its life to the supervisor's, seconds before torch is imported.
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
from ratchet.runs.signals import die_with_parent
from ratchet.training.stopping import GracefulShutdown

Work = Callable[[RunPaths, int, GracefulShutdown, Heartbeat], int]
"""Directory, number of the attempt, requests to stop, signs of life; returns the exit code."""


def main(arguments: list[str], kind: type[LaunchSpec], loaded: Callable[[], Work]) -> int:
    """Work, and end the process. Returns an exit code only when there is nobody to work for.

    Args:
        arguments: of the command line.
        kind: of the run's launch.json.
        loaded: imports what works, which takes seconds; called once the process's life is tied to its parent's.
    """
    paths, attempt, parent = RunPaths(Path(arguments[0])), int(arguments[1]), int(arguments[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        return EXIT_INTERRUPTED
    stop = GracefulShutdown().install()
    machine = kind.load(paths.launch).machine
    said = log.capture_output(paths.logs, machine, attempt, int(os.environ["RANK"]) if ":" in arguments[3] else None)
    limits = machine.stall_s, machine.stall_first_s
    if ":" in arguments[3]:
        heartbeat = Heartbeat.attach_at(arguments[3], int(os.environ["LOCAL_RANK"]), *limits)
    else:
        heartbeat = Heartbeat.attach(int(arguments[3]), *limits)
    heartbeat.beat("load")
    # Who finds us without a sign of life asks where every thread is before killing us. C code: works without the GIL.
    stacks = paths.stacks.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    exit_code = loaded()(paths, attempt, stop, heartbeat)
    said.end()
    os._exit(exit_code)  # all is on disk: taking torch apart takes seconds, and shows no sign of life


def _load_training_worker() -> Work:
    from ratchet.models import lazy_imports

    lazy_imports.import_model_libraries()
    with lazy_imports.pause_garbage_collection():
        from ratchet.training.worker import run_worker

    return run_worker


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], TrainingLaunchSpec, _load_training_worker))
