"""A worker of `ratchet sweep`.

A worker is the process `python -m ratchet.tuning.sweep_worker PROJECT SETTINGS PARENT_PID NUMBER [SOCKET]`, or a fork
that behaves like it (runs/fork_server.py). It runs one trial of the study after another until all work is done, or
several at a time (group_worker.py). With SOCKET, it is one of these, and trains its trial in their group. It uses
neither MLflow nor torch itself. Any number of workers, on any machines, may work on a study.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, RatchetError
from ratchet.redaction import print_exception, redact_stderr
from ratchet.runs.device_lock import DeviceLock
from ratchet.runs.directory import RunSpec
from ratchet.runs.fork_server import ForkServer
from ratchet.runs.group_connection import GroupConnection, WorkerServer
from ratchet.runs.log import print_message
from ratchet.runs.signals import StopSignal, die_with_parent
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning import group_worker
from ratchet.tuning.leases import SweepWorker, TrialLeaseLostError
from ratchet.tuning.scheduler import FinalRoundScheduler, TrialScheduler, open_final_store
from ratchet.tuning.storage import retry_storage
from ratchet.tuning.study_session import StudySession
from ratchet.tuning.trial import TrialTask, raise_if_requested, run_trial

WAIT_S = 1.0
"""Seconds between two checks for work, while other workers do the remaining work."""


@redact_stderr()
def main(arguments: list[str]) -> int:
    """Work on the study until all work is done; return the exit code."""
    sys.excepthook = print_exception
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(arguments[2]):
        return EXIT_INTERRUPTED
    with ForkServer() as server, StopSignal().installed() as stop:
        project, worker_params = Path(arguments[0]), Path(arguments[1])
        settings, group, device_lock = params_file.load(worker_params), None, DeviceLock(None)
        try:
            if len(arguments) > 4:
                group, device_lock = GroupConnection(Path(arguments[4])), DeviceLock(Path(arguments[4]).parent)
            elif (count := group_worker.count_concurrent_trials(settings)) > 1:
                group_worker.run_group(project, worker_params, arguments[3], count, stop, server)
                return EXIT_OK
            run_sweep_worker(ProjectLayout(project), settings, stop, server, group, device_lock)
        except RatchetError as error:
            print(f"{error}", file=sys.stderr)
            return error.exit_code
    return EXIT_OK


def run_sweep_worker(
    layout: ProjectLayout,
    settings: Settings,
    stop: StopSignal,
    server: ForkServer,
    group: GroupConnection | None,
    device_lock: DeviceLock,
) -> None:
    """Run the trials of the search, then those of the final round. `server` starts the trainings one at a time, except
    those of the search that `group` trains.

    Raises:
        InterruptedRunError: a stop was requested; the running trial is sealed and released.
    """
    worker, wait_s = SweepWorker.current(), settings.machine.storage_timeout_s

    @contextmanager
    def take_server(spec: RunSpec, check_waiting: Callable[[], None]) -> Iterator[WorkerServer]:
        is_grouped = group is not None and spec.is_grouped is True
        with device_lock.hold(is_exclusive=not is_grouped, check_stop=check_waiting):
            yield group if group is not None and is_grouped else server

    check_stop = partial(raise_if_requested, stop)
    with ExitStack() as stack:
        session = retry_storage(lambda: stack.enter_context(StudySession.open(layout, settings)), wait_s, check_stop)
        search = TrialScheduler(
            layout, settings, session.store, worker, server, check_stop, is_grouped=group is not None,
            device_lock=device_lock,
        )  # fmt: skip
        run = partial(run_trial, layout=session.layout, worker=worker, stop=stop, take_server=take_server)
        _run_all_trials(search, session, run, stop)
        seeds = retry_storage(
            lambda: open_final_store(session.store, session.identity, settings, session.space), wait_s, check_stop
        )
        finals = FinalRoundScheduler(layout, settings, session.store, seeds, worker, server, check_stop, device_lock)
        _run_all_trials(finals, session, run, stop)


def _run_all_trials(
    scheduler: TrialScheduler | FinalRoundScheduler,
    session: StudySession,
    run: Callable[[TrialTask], None],
    stop: StopSignal,
) -> None:
    check_stop = partial(raise_if_requested, stop)
    while True:
        check_stop()
        work = retry_storage(scheduler.next, session.settings.machine.storage_timeout_s, check_stop)
        if work == "over":
            return
        if work == "wait":
            time.sleep(WAIT_S)
        elif isinstance(work, TrialTask):
            try:
                run(work)
            except TrialLeaseLostError as error:
                print_message(f"{error}")
        else:
            work()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
