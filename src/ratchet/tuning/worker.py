"""A worker of a sweep: `python -m ratchet.tuning.worker PROJECT SETTINGS PARENT_PID`.

It runs one trial of the study after another until all work is done. It imports neither MLflow nor torch. Any number of
workers, on any machines, may work on one study.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Protocol

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InterruptedRunError, RatchetError
from ratchet.redaction import print_exception, redact_stderr
from ratchet.runs.log import print_message
from ratchet.runs.signals import die_with_parent, list_stop_signals
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning import validation_scores
from ratchet.tuning.leases import SweepWorker, TrialLeaseLostError
from ratchet.tuning.scheduler import FinalRoundScheduler, TrialScheduler, WorkItem, open_final_store
from ratchet.tuning.storage_retry import retry_storage
from ratchet.tuning.study import StudySession
from ratchet.tuning.trial import Idle, TrialTask, run_trial

WAIT_S = 1.0
"""Interval of polling while other workers have the rest of the work."""


class TrialSource(Protocol):
    """A source of work: the search, then the final round."""

    def next(self) -> TrialTask | WorkItem | Idle:
        """Return the next work; `over`: there is none any more."""


class WorkerStopSignal:
    """Requests to stop this worker: signals between two trials; during a trial its supervisor handles them."""

    def __init__(self) -> None:
        self.is_requested = False
        for number in list_stop_signals():
            signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.on_stop_signal()

    def on_stop_signal(self) -> None:
        """Record the request."""
        self.is_requested = True

    def raise_if_requested(self) -> None:
        """Raise InterruptedRunError if a stop was requested."""
        if self.is_requested:
            raise InterruptedRunError("stopped on request")


@redact_stderr()
def main(arguments: list[str]) -> int:
    """Work until all work is done; return the exit code."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(arguments[2]):
        return EXIT_INTERRUPTED
    stop = WorkerStopSignal()
    layout, settings = ProjectLayout(Path(arguments[0])), params_file.load(Path(arguments[1]))
    try:
        run_sweep_worker(layout, settings, stop)
    except RatchetError as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def run_sweep_worker(layout: ProjectLayout, settings: Settings, stop: WorkerStopSignal) -> None:
    """Run the trials of the search, then those of the final round.

    Raises:
        InterruptedRunError: a stop was requested; the running trial is sealed and released.
    """
    worker, wait_s = SweepWorker.current(), settings.machine.storage_timeout_s
    with ExitStack() as stack:
        session = retry_storage(
            lambda: stack.enter_context(StudySession.open(layout, settings)), wait_s, stop.raise_if_requested
        )
        for source in _iterate_sources(session, worker, stop):
            _run_all_trials(source, session, worker, stop)


def _iterate_sources(session: StudySession, worker: SweepWorker, stop: WorkerStopSignal) -> Iterator[TrialSource]:
    layout, settings = session.layout, session.settings

    def score_answers(trained: Settings, run_id: str, metrics: Sequence[str]) -> Mapping[str, float]:
        return validation_scores.score_run(layout, trained, run_id, metrics, stop.raise_if_requested)

    yield TrialScheduler(layout, settings, session.store, worker, score_answers)
    wait_s = settings.machine.storage_timeout_s
    seeds = retry_storage(
        lambda: open_final_store(session.store, session.identity, settings, session.space),
        wait_s,
        stop.raise_if_requested,
    )
    yield FinalRoundScheduler(layout, settings, session.store, seeds, worker, stop.raise_if_requested)


def _run_all_trials(source: TrialSource, session: StudySession, worker: SweepWorker, stop: WorkerStopSignal) -> None:
    while True:
        stop.raise_if_requested()
        work = retry_storage(source.next, session.settings.machine.storage_timeout_s, stop.raise_if_requested)
        if work == "over":
            return
        if work == "wait":
            time.sleep(WAIT_S)
        elif isinstance(work, TrialTask):
            try:
                run_trial(work, session.layout, worker, stop)
            except TrialLeaseLostError as error:
                print_message(f"{error}")
        else:
            work()


if __name__ == "__main__":
    sys.excepthook = print_exception
    sys.exit(main(sys.argv[1:]))
