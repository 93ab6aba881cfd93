"""A sweep worker that trains several trials together: a pool of workers, and the training group that they share.

Each worker of the pool runs one trial at a time, with its own lease and supervisor. The group (training/group_main.py)
trains the runs of all of them in one process.
"""

import os
import select
import tempfile
import time
from pathlib import Path

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import InterruptedRunError
from ratchet.runs.fork_server import ForkedProcess, ForkServer, Program
from ratchet.runs.group_connection import listen
from ratchet.runs.log import print_message
from ratchet.runs.rendezvous import has_agent
from ratchet.runs.signals import StopSignal
from ratchet.storage import files
from ratchet.training.group_main import RECORD
from ratchet.tuning.worker_pool import LocalWorkerLauncher, WorkerPool

GROUP_MODULE = "ratchet.training.group_main"
POLL_S = 0.5
MIN_LIFE_S = 5.0
"""A group that has died is started again at once, but at most once in this number of seconds."""


def count_concurrent_trials(settings: Settings) -> int:
    """Return how many trials a worker on this machine trains together.

    It is 1 if the settings of section train do not allow a group. `auto` is 1: the rows of one trial keep a CPU busy
    (docs/evidence_speed.md), and groups are not measured on a GPU yet.
    """
    if has_agent(settings.machine):  # each trial needs several ranks
        return 1
    if settings.train.grouping_obstacle is not None and "train.initialization" not in settings.sweep.space:
        return 1
    setting = settings.sweep.concurrent_trials
    return 1 if setting == "auto" else setting


def run_group(
    project: Path, worker_params: Path, number: str, count: int, stop: StopSignal, server: ForkServer
) -> None:
    """Work on the study with `count` trials at a time until all work is done.

    Args:
        project: root of the project.
        worker_params: settings of the workers; logs are written next to this file.
        number: number of this worker, which stays the same when it is started again.
        count: number of trials.
        stop: requests to stop.
        server: starts the training group.

    Raises:
        InterruptedRunError: a stop was requested; the running trials are sealed and released.
        InputError, RunFailedError: see `WorkerPool.poll`.
    """
    folder, grace_s = worker_params.parent / f"group-{number}", params_file.load(worker_params).machine.grace_period_s
    files.make_directory(folder)
    with tempfile.TemporaryDirectory(prefix="ratchet-group-") as socket_folder:  # the path of a socket must be short
        path = Path(socket_folder) / "socket"
        launcher = LocalWorkerLauncher([str(project), str(worker_params)], (number, str(path)))
        with listen(path) as listener:
            group = _Group(server, listener.fileno(), folder)
            pool = WorkerPool(launcher, count, folder, None, print_message)
            try:
                while pool.poll() and not stop.is_requested:
                    group.ensure(is_needed=bool(select.select([listener], [], [], 0)[0]))
                    stop.wait(POLL_S, _do_nothing)
            finally:
                pool.stop(grace_s)
    if stop.is_requested:
        raise InterruptedRunError("stopped on request")
    (folder / RECORD).unlink(missing_ok=True)


class _Group:
    """The process of a group, which is started again when it has died."""

    def __init__(self, server: ForkServer, listener: int, folder: Path) -> None:
        self._server, self._listener, self._folder = server, listener, folder
        self._process: ForkedProcess | None = None
        self._started_s = 0.0

    def ensure(self, is_needed: bool) -> None:
        """Start the process if a run needs it, and it does not run."""
        exit_code = None if self._process is None else self._process.poll()
        if self._process is not None and exit_code is None:
            return
        now_s = time.monotonic()
        if not is_needed or (exit_code and now_s - self._started_s < MIN_LIFE_S):
            return
        if exit_code:
            print_message(f"the training group died (exit code {exit_code}); starting another one")
        self._started_s = now_s
        environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # see runs/supervisor.py
        with (self._folder / "group.log").open("ab") as log:
            program = Program(GROUP_MODULE, (self._listener, str(self._folder), None), environment)
            self._process = self._server.start(program, log.fileno())


def _do_nothing() -> None:
    """Do nothing while waiting."""
