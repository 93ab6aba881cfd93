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
from ratchet.redaction import shielded, show_error
from ratchet.runs.log import say
from ratchet.runs.signals import die_with_parent, requests
from ratchet.storage.layout import Layout
from ratchet.tuning import validation_scores
from ratchet.tuning.leases import LeaseLostError, Worker
from ratchet.tuning.scheduler import Errand, Finale, Search, register_of
from ratchet.tuning.storage_retry import patiently
from ratchet.tuning.study import Desk
from ratchet.tuning.trial import Assignment, Idle, carry_out

WAIT_S = 1.0
"""Between two looks at a study in which others have the rest of the work."""


class Phase(Protocol):
    """A source of work: the search, and then the finals."""

    def next(self) -> Assignment | Errand | Idle:
        """What to do next; `over`: nothing, for good."""


class Asked:
    """Whether this worker is to end: set by a signal between two trials; during one the supervisor has the signals."""

    def __init__(self) -> None:
        self.now = False
        for number in requests():
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


@shielded()
def main(arguments: list[str]) -> int:
    """Work until nothing is left to do; returns the exit code."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(arguments[2]):
        return EXIT_INTERRUPTED
    asked = Asked()
    layout, settings = Layout(Path(arguments[0])), params_file.load(Path(arguments[1]))
    try:
        work(layout, settings, asked)
    except RatchetError as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def work(layout: Layout, settings: Settings, asked: Asked) -> None:
    """Carry out what the search has, and then what the finals have.

    Raises:
        InterruptedRunError: asked to stop; the trial that was under way is sealed and given back.
    """
    worker, wait_s = Worker.here(), settings.machine.storage_wait_s
    with ExitStack() as stack:
        desk = patiently(lambda: stack.enter_context(Desk.open(layout, settings)), wait_s, asked.look)
        for phase in _phases(desk, worker, asked):
            _carry_out_all(phase, desk, worker, asked)


def _phases(desk: Desk, worker: Worker, asked: Asked) -> Iterator[Phase]:
    layout, settings = desk.layout, desk.settings

    def answers(trained: Settings, run_id: str, metrics: Sequence[str]) -> Mapping[str, float]:
        return validation_scores.figures(layout, trained, run_id, metrics, asked.look)

    yield Search(layout, settings, desk.register, worker, answers)
    wait_s = settings.machine.storage_wait_s
    seeds = patiently(lambda: register_of(desk.register, desk.identity, settings, desk.space), wait_s, asked.look)
    yield Finale(layout, settings, desk.register, seeds, worker, asked.look)


def _carry_out_all(phase: Phase, desk: Desk, worker: Worker, asked: Asked) -> None:
    while True:
        asked.look()
        found = patiently(phase.next, desk.settings.machine.storage_wait_s, asked.look)
        if found == "over":
            return
        if found == "wait":
            time.sleep(WAIT_S)
        elif isinstance(found, Assignment):
            try:
                carry_out(found, desk.layout, worker, asked)
            except LeaseLostError as error:
                say(f"{error}")
        else:
            found()


if __name__ == "__main__":
    sys.excepthook = show_error
    sys.exit(main(sys.argv[1:]))
