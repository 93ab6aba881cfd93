"""A worker of a sweep: `python -m ratchet.tuning.worker PROJECT SETTINGS PARENT_PID`.

It carries out one trial after another, whichever the study has for it, until there is nothing left to do; it knows
neither MLflow nor torch. Any number of them, here and elsewhere, may work on one study.
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
from ratchet.config.schema import Settings
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InterruptedRunError, RatchetError
from ratchet.redaction import print_exception, redact_stderr
from ratchet.runs.log import print_message
from ratchet.runs.signals import die_with_parent, list_stop_signals
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning import validation_scores
from ratchet.tuning.leases import SweepWorker, TrialLeaseLostError
from ratchet.tuning.scheduler import Errand, FinalRoundScheduler, TrialScheduler, open_final_store
from ratchet.tuning.storage_retry import retry_storage
from ratchet.tuning.study import StudySession
from ratchet.tuning.trial import Idle, TrialTask, run_trial

WAIT_S = 1.0
"""Between two looks at a study in which others have the rest of the work."""


class TrialSource(Protocol):
    """A source of work: the search, and then the finals."""

    def next(self) -> TrialTask | Errand | Idle:
        """What to do next; `over`: nothing, for good."""


class WorkerStopSignal:
    """Whether this worker is to end: set by a signal between two trials; during one the supervisor has the signals."""

    def __init__(self) -> None:
        self.now = False
        for number in list_stop_signals():
            signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signalled()

    def signalled(self) -> None:
        """Remember it."""
        self.now = True

    def look(self) -> None:
        """Raise InterruptedRunError when it is."""
        if self.now:
            raise InterruptedRunError("asked to stop")


@redact_stderr()
def main(arguments: list[str]) -> int:
    """Work until nothing is left to do; returns the exit code."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(arguments[2]):
        return EXIT_INTERRUPTED
    asked = WorkerStopSignal()
    layout, settings = ProjectLayout(Path(arguments[0])), params_file.load(Path(arguments[1]))
    try:
        run_sweep_worker(layout, settings, asked)
    except RatchetError as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def run_sweep_worker(layout: ProjectLayout, settings: Settings, asked: WorkerStopSignal) -> None:
    """Carry out what the search has, and then what the finals have.

    Raises:
        InterruptedRunError: asked to stop; the trial that was under way is sealed and given back.
    """
    worker, wait_s = SweepWorker.here(), settings.machine.storage_wait_s
    with ExitStack() as stack:
        desk = retry_storage(lambda: stack.enter_context(StudySession.open(layout, settings)), wait_s, asked.look)
        for phase in _iterate_sources(desk, worker, asked):
            _run_all_trials(phase, desk, worker, asked)


def _iterate_sources(desk: StudySession, worker: SweepWorker, asked: WorkerStopSignal) -> Iterator[TrialSource]:
    layout, settings = desk.layout, desk.settings

    def answers(trained: Settings, run_id: str, metrics: Sequence[str]) -> Mapping[str, float]:
        return validation_scores.score_run(layout, trained, run_id, metrics, asked.look)

    yield TrialScheduler(layout, settings, desk.register, worker, answers)
    wait_s = settings.machine.storage_wait_s
    seeds = retry_storage(
        lambda: open_final_store(desk.register, desk.identity, settings, desk.space), wait_s, asked.look
    )
    yield FinalRoundScheduler(layout, settings, desk.register, seeds, worker, asked.look)


def _run_all_trials(phase: TrialSource, desk: StudySession, worker: SweepWorker, asked: WorkerStopSignal) -> None:
    while True:
        asked.look()
        found = retry_storage(phase.next, desk.settings.machine.storage_wait_s, asked.look)
        if found == "over":
            return
        if found == "wait":
            time.sleep(WAIT_S)
        elif isinstance(found, TrialTask):
            try:
                run_trial(found, desk.layout, worker, asked)
            except TrialLeaseLostError as error:
                print_message(f"{error}")
        else:
            found()


if __name__ == "__main__":
    sys.excepthook = print_exception
    sys.exit(main(sys.argv[1:]))
