"""A worker of a sweep: `python -m ratchet.sweeping.worker PROJECT SETTINGS PARENT_PID`.

It carries out one trial after another, whichever the study has for it, until there is nothing left to do; it knows
neither MLflow nor torch. Any number of them, here and elsewhere, may work on one study.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Protocol

from ratchet import params
from ratchet.config import Settings
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InterruptedRunError, RatchetError
from ratchet.layout import Layout
from ratchet.run.signals import die_with_parent
from ratchet.studies.leases import LeaseLostError, Worker
from ratchet.sweeping.desk import Desk
from ratchet.sweeping.search import Idle
from ratchet.sweeping.trial import Assignment, carry_out

WAIT_S = 1.0
"""Between two looks at a study in which others have the rest of the work."""


class Phase(Protocol):
    """A source of work: the search, and then the finals."""

    def next(self) -> Assignment | Idle:
        """What to do next; `over`: nothing, for good."""


class Asked:
    """Whether this worker is to end: set by a signal between two trials; during one the supervisor has the signals."""

    def __init__(self) -> None:
        self.now = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.now = True


def main(arguments: list[str]) -> int:
    """Work until nothing is left to do; returns the exit code."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(arguments[2]):
        return EXIT_INTERRUPTED
    asked = Asked()
    layout, settings = Layout(Path(arguments[0])), params.load(Path(arguments[1]))
    try:
        work(layout, settings, asked)
    except RatchetError as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code
    return EXIT_INTERRUPTED if asked.now else EXIT_OK


def work(layout: Layout, settings: Settings, asked: Asked) -> None:
    """Carry out what the search has, and then what the finals have.

    Raises:
        InterruptedRunError: asked to stop; the trial that was under way is sealed and given back.
    """
    worker = Worker.here()
    with Desk.open(layout, settings) as desk:
        for phase in desk.phases(worker):
            while not asked.now:
                found = phase.next()
                if found == "over":
                    break
                if found == "wait":
                    time.sleep(WAIT_S)
                    continue
                try:
                    carry_out(found, layout, worker)
                except LeaseLostError as error:
                    print(f"{error}", file=sys.stderr)
            if asked.now:
                raise InterruptedRunError("asked to stop between two trials")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
